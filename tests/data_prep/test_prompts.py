"""Selecting prompts: deterministic, disjoint, no row lost, and every invalid one named with its line and reason."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from data_prep.bench import write_chats
from data_prep.cleaning.conversations import read_conversation, read_messages
from data_prep.cleaning.filters import normalized
from data_prep.cleaning.near_dedup import signature
from data_prep.prompts import main
from data_prep.readers.json_array import REST_INVALID
from specforge_dspine.utils.errors import InvalidRow
from tests.conftest import wait_for
from tests.support import ROOT
from tests.support.broken_file import INVALID, SHAPES, bot, broken_file, user
from tests.support.commands import refuse, succeed


def select(out: Path, *inputs: object, **options: Any) -> list[dict[str, Any]]:
    """Runs the command with ``out`` as its output, and returns the rows of that."""
    succeed(main, words(out, *inputs, **options))
    return rows(out)


def words(out: Path, *inputs: object, **options: Any) -> list[str]:
    """The command line."""
    result = ["--input", *map(str, inputs), "--output", str(out)]
    for name, value in options.items():
        values = [] if value is True else value if isinstance(value, list) else [value]
        result += [f"--{name.replace('_', '-')}", *map(str, values)]
    return result


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def dropped(out: Path) -> list[tuple[int, str]]:
    return [(row["line"], row["reason"]) for row in rows(Path(f"{out}.dropped.jsonl"))]


def summary(out: Path) -> dict[str, Any]:
    return json.loads(Path(f"{out}.summary.json").read_text(encoding="utf-8"))


def write(path: Path, *entries: Any) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def asked(chosen: list[dict[str, Any]]) -> list[str]:
    return [row["messages"][0]["content"] for row in chosen]


@pytest.mark.parametrize(("entry", "reason"), INVALID)
def test_invalid_conversations_are_named(entry: Any, reason: str) -> None:
    # SpecForge#482, #221
    with pytest.raises(InvalidRow) as caught:
        read_messages(entry)
    assert caught.value.reason == reason


def test_every_shape_is_read() -> None:
    for number, shape in enumerate(SHAPES):
        messages = read_conversation(shape("Why?"))
        first = next(message["content"] for message in messages if message["role"] == "user")
        assert first == ("Translate.\n\nWhy?" if number == 7 else "Why?")
    system = SHAPES[10]("Why?") | {"messages": None}
    assert read_conversation(system)[0] == {"role": "system", "content": "Be brief."}
    for shape in (SHAPES[7], SHAPES[11]):
        assert read_conversation(shape("Why?"))[1] == {"role": "assistant", "content": "An answer."}
        assert [message["role"] for message in read_messages(shape("Why?"))] == ["user"]
    llama = (
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert read_conversation({"text": llama}) == [{"role": "user", "content": "Why?"}]


def test_reasoning_is_told_from_the_response() -> None:
    expected = {"role": "assistant", "content": "Four.", "reasoning_content": "Add."}
    for answer in (
        {"role": "assistant", "content": "<think>\nAdd.\n</think>\n\nFour."},
        {"role": "assistant", "content": "Four.", "reasoning": "Add."},
        {"from": "gpt", "value": "Four.", "thinking": "Add."},
    ):
        assert read_conversation({"messages": [{"role": "user", "content": "2 + 2?"}, answer]})[1] == expected


def test_turns_are_capped_and_end_with_the_user() -> None:
    entry = {"conversations": [user("a"), bot("b"), user("c"), bot("d"), user("e"), bot("f")]}
    for turns, kept in ((1, "a"), (2, "abc"), (3, "abcde"), (None, "abcde")):
        assert "".join(part["content"] for part in read_messages(entry, turns)) == kept


@pytest.mark.parametrize(("workers", "name"), [(1, "chats.jsonl"), (2, "chats.jsonl"), (2, "chats.json")])
def test_a_mixed_and_broken_file_comes_out_as_its_writer_says(tmp_path: Path, workers: int, name: str) -> None:
    as_array = name == "chats.json"
    made = broken_file(10_000, seed=5, as_array=as_array)
    path = made.write_array(tmp_path / name) if as_array else made.write(tmp_path / name)
    out = tmp_path / "out.jsonl"
    kept = select(out, path, workers=workers)
    assert dropped(out) == made.dropped and len(made.dropped) > 2500
    assert [row["line"] for row in kept] == made.kept and len(made.kept) > 6000
    figures = summary(out)
    assert figures["rows_in"] == figures["rows_kept"] + sum(figures["rows_dropped"].values())
    assert figures["rows_kept"] == len(made.kept)
    assert len({row["id"] for row in kept}) == len(kept)
    details = {row["reason"]: row["detail"] for row in rows(Path(f"{out}.dropped.jsonl"))}
    assert ("nothing after it was read" in details.get(REST_INVALID, "")) == as_array
    assert "byte" in details["not UTF-8"] or "surrogate" in details["not UTF-8"]
    assert {row["file"] for row in rows(Path(f"{out}.dropped.jsonl"))} == {str(path)}


def test_one_bad_file_among_many_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "a.jsonl", {"prompt": "a"})
    (folder / "b.parquet").write_text("no parquet")
    write(folder / "c.jsonl", {"prompt": "c"})
    assert asked(select(tmp_path / "out.jsonl", folder)) == ["a", "c"]
    (bad,) = rows(tmp_path / "out.jsonl.dropped.jsonl")
    assert (bad["file"], bad["line"], bad["reason"]) == (str(folder / "b.parquet"), None, "the file cannot be read")
    assert "repair the file" in bad["detail"]


def test_a_name_that_is_not_utf8_is_written_out(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / os.fsdecode(b"\xe9t\xe9.jsonl"), {"prompt": "a"}, 5)
    (kept,) = select(tmp_path / "out.jsonl", folder)
    (bad,) = rows(tmp_path / "out.jsonl.dropped.jsonl")
    assert kept["source"] == bad["file"] == rf"{folder}/\xe9t\xe9.jsonl" and bad["line"] == 2


def test_other_inputs_are_refused_by_the_first_that_differ(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{number}.jsonl", {"prompt": f"{number}"}) for number in range(20)]
    out = tmp_path / "out.jsonl"
    select(out, *files)
    refuse(
        main, words(out, *files[::-1]), r"files\.1 \S+/0\.jsonl was 'sha256 \w+' and is now 'absent'; .*; and 34 more"
    )
    one = tmp_path / "one.jsonl"
    select(one, files[0])
    refuse(main, words(one, files[0], files[0]), r"files\.2 \S+/0\.jsonl was 'absent' and is now 'sha256")


AS_NOBODY = """
import os, sys
from data_prep import prompts
os.setuid(65534)
sys.exit(prompts.main())
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user can reach."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        Path(path).chmod(0o777)
        yield Path(path)


def test_files_without_permission_are_named(public: Path) -> None:
    """A child of another uid, for root may read everything."""
    folder = public / "data"
    folder.mkdir()
    write(folder / "a.jsonl", {"prompt": "a"})
    write(folder / "b.jsonl", {"prompt": "b"}).chmod(0)
    (folder / "c").mkdir(mode=0)
    (public / "closed").mkdir(mode=0o755)

    def run(output: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", AS_NOBODY, "--input", "data", "--output", output]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, capture_output=True, text=True, cwd=public, env=environment)

    child = run("out.jsonl")
    assert child.returncode == 0, child.stderr
    assert asked(rows(public / "out.jsonl")) == ["a"]
    details = {row["file"]: row["detail"] for row in rows(public / "out.jsonl.dropped.jsonl")}
    assert details.keys() == {"data/b.jsonl", "data/c"}
    assert all("Permission denied; make it readable and run again" in detail for detail in details.values())
    refused = run("closed/out.jsonl")
    assert refused.returncode == 2 and "error: " in refused.stderr and "Traceback" not in refused.stderr
    assert not list((public / "closed").iterdir())


def test_exact_duplicates_are_dropped_up_to_case_and_space(tmp_path: Path) -> None:
    system = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why?"}]}
    chats = write(
        tmp_path / "a.jsonl", {"prompt": "Why?"}, {"prompt": " WHY? "}, system, {"data": ["Why?", "x", "And?"]}
    )
    out = tmp_path / "out.jsonl"
    assert [row["line"] for row in select(out, chats)] == [1, 3, 4]
    assert dropped(out) == [(2, "duplicate")]


def test_the_same_words_in_other_roles_are_another_prompt(tmp_path: Path) -> None:
    system = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why?"}]}
    chats = write(tmp_path / "a.jsonl", system, {"data": ["Be kind.", "x", "Why?"]})
    assert len({row["id"] for row in select(tmp_path / "out.jsonl", chats)}) == 2


TEXT = "How do I write a short and friendly letter to my landlord about the broken heating in the small kitchen today"


def test_near_duplicates_are_dropped_and_the_index_is_on_disk(tmp_path: Path) -> None:
    other = "Please explain in simple words why the sky is blue in the day and why it turns red in the evening hours"
    chats = write(tmp_path / "a.jsonl", {"prompt": TEXT}, {"prompt": other}, {"prompt": f"{TEXT}, please"})
    out = tmp_path / "out.jsonl"
    assert [row["line"] for row in select(out, chats, near=0.7)] == [1, 2]
    (near,) = rows(tmp_path / "out.jsonl.dropped.jsonl")
    assert near["reason"] == "near duplicate" and near["detail"].endswith(f"like {chats}, line 1")
    words = [set(normalized(text).split()) for text in (TEXT, other)]
    assert len(words[0] & words[1]) < 10
    first, second = (np.frombuffer(signature(text.lower()), np.uint32) for text in (TEXT, other))
    alike = (first == second).mean()
    assert alike < 0.1
    assert len(select(tmp_path / "all.jsonl", chats)) == 3


@pytest.mark.parametrize("near", [0.05, 0.98, 0.99, 1])
def test_every_similarity_works(tmp_path: Path, near: float) -> None:
    chats = write(tmp_path / "a.jsonl", {"prompt": TEXT}, {"data": [TEXT, "x", "🙂"]}, {"prompt": f"{TEXT}\n🙂"})
    out = tmp_path / "out.jsonl"
    assert [row["line"] for row in select(out, chats, near=near)] == ([1] if near < 0.9 else [1, 2])
    assert dropped(out)[-1] == (3, "near duplicate")


CHINESE = (
    "请写一篇关于最近去夏威夷旅行的引人入胜的博客文章，突出文化体验和必看景点，并且给出详细的行程安排和预算建议。"
)


def test_texts_without_spaces_are_compared_too(tmp_path: Path) -> None:
    japanese = "東京から京都まで新幹線で行くときのおすすめの観光地と食べ物を詳しく教えてください。"
    own = write(tmp_path / "eval.jsonl", {"prompt": CHINESE}, {"prompt": japanese}, {"prompt": "法国的首都是哪里？"})
    symbols = write(tmp_path / "symbols.jsonl", {"prompt": "???"}, {"prompt": CHINESE})
    chats = write(
        tmp_path / "a.jsonl",
        {"prompt": f"请帮我：{CHINESE}谢谢"},
        {"prompt": f"{japanese}お願いします。"},
        {"prompt": "法国的首都是哪里"},
        {"prompt": "德国的首都是哪里？"},
        {"prompt": "🙂🙂"},
    )
    out = tmp_path / "out.jsonl"
    assert [row["line"] for row in select(out, chats, decontaminate=[own])] == [4, 5]
    kept = select(tmp_path / "symbols.out.jsonl", chats, decontaminate=[symbols])
    assert [row["line"] for row in kept] == [2, 3, 4, 5]
    close = write(tmp_path / "b.jsonl", {"prompt": CHINESE}, {"prompt": CHINESE.replace("最近", "近日")})
    assert [row["line"] for row in select(tmp_path / "near.jsonl", close, near=0.7)] == [1]
    symbols = write(tmp_path / "c.jsonl", {"prompt": "🙂🙂"}, {"prompt": "🚀"}, {"prompt": "???"})
    assert len(select(tmp_path / "other.jsonl", symbols, near=0.8)) == 3


def test_heldout_prompts_are_on_one_side_only(tmp_path: Path) -> None:
    prompts = [{"prompt": f"Question {number}"} for number in range(400)]
    later = [{"data": [f"Opening {number}", "x", f"question  {number}"]} for number in range(400)]
    files = [write(tmp_path / "a.jsonl", *prompts), write(tmp_path / "b.jsonl", *later)]
    heldout = tmp_path / "heldout.jsonl"
    train = select(tmp_path / "train.jsonl", *files, heldout=heldout, heldout_share=0.25)
    out = rows(heldout)
    assert 150 < len(out) < 250 and len(train) + len(out) + len(dropped(tmp_path / "train.jsonl")) == 800
    firsts = {normalized(text) for text in asked(out)}
    said = {normalized(message["content"]) for row in train for message in row["messages"]}
    assert not firsts & said
    assert {reason for _, reason in dropped(tmp_path / "train.jsonl")} == {"a later turn is a held-out prompt"}
    # The same prompts are held out of another file, in another order.
    again = tmp_path / "again.jsonl"
    select(tmp_path / "train2.jsonl", write(tmp_path / "c.jsonl", *prompts[::-1]), heldout=again, heldout_share=0.25)
    questions = {text for text in asked(out) if text.startswith("Q")}
    assert set(asked(rows(again))) == questions


def test_evaluation_sets_are_kept_out(tmp_path: Path) -> None:
    quoted = "Compose an engaging travel blog post about a recent trip to Hawaii, highlighting cultural experiences"
    chats = write(
        tmp_path / "a.jsonl",
        {"prompt": f"Here is my task: {quoted} and must-see attractions. Go."},
        {"prompt": "Write a blog post about Hawaii."},
        {"prompt": "the short one"},
        {"prompt": "the short one, longer"},
    )
    own = write(tmp_path / "eval.jsonl", {"question": "The short one!"})
    out = tmp_path / "out.jsonl"
    assert [row["line"] for row in select(out, chats, decontaminate=["mt-bench", "human-eval", own])] == [2, 4]
    assert dropped(out) == [(1, "in an evaluation set"), (3, "in an evaluation set")]
    assert rows(tmp_path / "out.jsonl.dropped.jsonl")[0]["detail"].startswith("mt-bench, line ")


def test_filters_drop_what_they_are_asked_to(tmp_path: Path) -> None:
    german = "Wie schreibe ich einen freundlichen Brief an meinen Vermieter wegen der kaputten Heizung in der Küche?"
    chats = write(tmp_path / "a.jsonl", {"prompt": TEXT}, {"prompt": german}, {"prompt": "Hi"}, {"prompt": TEXT * 30})
    out = tmp_path / "out.jsonl"
    assert [row["line"] for row in select(out, chats, language=["en"], max_chars=500)] == [1, 3]
    assert dropped(out) == [(2, "language"), (4, "length")]
    assert [row["line"] for row in select(tmp_path / "b.jsonl", chats, language=["de", "fr"], min_chars=3)] == [2]


def test_limits_end_the_reading_and_inputs_can_take_turns(tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{name}.jsonl", *({"prompt": f"{name}{number}"} for number in range(20))) for name in "ab"
    ]
    assert asked(select(tmp_path / "one.jsonl", *files, limit=5)) == ["a0", "a1", "a2", "a3", "a4"]
    assert asked(select(tmp_path / "two.jsonl", *files, limit=5, interleave=True)) == ["a0", "b0", "a1", "b1", "a2"]
    assert summary(tmp_path / "two.jsonl")["rows_in"] == 5
    assert len(select(tmp_path / "all.jsonl", *files, interleave=True)) == 40
    packages = select(tmp_path / "p.jsonl", "chatterbot", "reasoning-gym", limit=30, interleave=True)
    assert {row["source"].partition("/")[0] for row in packages} == {"chatterbot", "reasoning-gym"}
    out, heldout = tmp_path / "h.jsonl", tmp_path / "h2.jsonl"
    select(out, "reasoning-gym", limit=40, heldout=heldout, heldout_share=0.5, heldout_limit=10)
    assert (len(rows(out)), len(rows(heldout))) == (40, 10)
    assert summary(out)["rows_dropped"]["beyond the limit"] > 5
    select(tmp_path / "i.jsonl", "reasoning-gym", limit=20, heldout=tmp_path / "i2.jsonl", heldout_share=0.5)
    assert len(rows(tmp_path / "i.jsonl")) == 20, "the held-out rows without a limit do not go on for ever"


def test_running_twice_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats, out = write(tmp_path / "a.jsonl", {"prompt": "a"}), tmp_path / "out.jsonl"
    select(out, chats)
    written = out.stat().st_mtime_ns
    select(out, chats)
    assert out.stat().st_mtime_ns == written and "is there already" in capsys.readouterr().out
    refuse(main, words(out, chats, max_turns=2), "max_turns was None and is now 2")
    write(chats, {"prompt": "b"})
    refuse(main, words(out, chats), r"files\.1 \S+ was .*--overwrite")
    assert asked(select(out, chats, overwrite=True)) == ["b"]


@pytest.mark.parametrize("interleave", [False, True])
def test_killed_and_continued_gives_the_same_files(tmp_path: Path, interleave: bool) -> None:
    chats = tmp_path / "chats.json"
    write_chats(chats, 12)
    more = broken_file(3000, seed=1).write(tmp_path / "more.jsonl")
    options = ["--heldout-share", "0.1", "--near", "0.9", *(["--interleave"] if interleave else [])]
    command = [sys.executable, "-m", "data_prep.prompts", "--input", str(chats), str(more), *options]

    def run(folder: Path) -> subprocess.Popen[bytes]:
        files = ["--output", str(folder / "out.jsonl"), "--heldout", str(folder / "held.jsonl")]
        return subprocess.Popen([*command, *files], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    undisturbed, killed = tmp_path / "a", tmp_path / "b"
    assert run(undisturbed).wait() == 0
    partial = killed / "out.jsonl.partial"
    process = run(killed)
    try:
        wait_for(lambda: process.poll() is not None or (partial.exists() and partial.stat().st_size > 2 << 20), 120)
        assert process.poll() is None and not (killed / "out.jsonl").exists(), "killed in the middle"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert run(killed).wait() == 0
    names = sorted(path.name for path in undisturbed.iterdir())
    assert sorted(path.name for path in killed.iterdir()) == names and len(names) == 4
    for name in names:
        assert (killed / name).read_bytes() == (undisturbed / name).read_bytes(), name


def test_a_large_file_streams_through_little_memory(tmp_path: Path) -> None:
    _memory(tmp_path, megabytes=80, most=400)


@pytest.mark.slow
def test_two_gigabytes_stream_through_less_than_one(tmp_path: Path) -> None:
    _memory(tmp_path, megabytes=2000, most=1000)


def _memory(folder: Path, megabytes: int, most: int) -> None:
    """The command and its workers together stay below ``most`` MB, whatever the file's size."""
    chats = folder / "sharegpt.json"
    count = write_chats(chats, megabytes)
    command = [
        sys.executable,
        "-m",
        "data_prep.prompts",
        "--input",
        str(chats),
        "--output",
        str(folder / "out.jsonl"),
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    highest = 0
    try:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            total = 0
            for each in [watched, *_children(watched)]:
                try:
                    total += each.memory_full_info().uss
                except psutil.Error:
                    continue
            highest = max(highest, total)
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert summary(folder / "out.jsonl")["rows_in"] == count
    assert 0 < highest < most * 1e6
    shutil.rmtree(folder)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


@pytest.mark.parametrize("victim", ["command", "worker"])
def test_workers_end_with_a_killed_command_and_a_killed_worker_is_told(tmp_path: Path, victim: str) -> None:
    chats = tmp_path / "chats.jsonl"
    write_chats(chats, 30)
    command = [sys.executable, "-m", "data_prep.prompts", "--input", str(chats), "--workers", "2", "--near", "0.8"]
    command += ["--output", str(tmp_path / "out.jsonl")]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    children: list[psutil.Process] = []
    try:
        watched = psutil.Process(process.pid)

        def started() -> bool:
            children[:] = [each for each in _children(watched) if "spawn_main" in " ".join(each.cmdline())]
            return len(children) == 2

        wait_for(started, 60)
        time.sleep(1)  # past the start of the workers
        if victim == "worker":
            children[0].kill()
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 1 and "fewer --workers, and the same command continues" in errors
            assert "Traceback" not in errors
    finally:
        process.kill()
        process.communicate()
    wait_for(lambda: not any(each.is_running() and each.status() != "zombie" for each in children), 30)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--heldout", "held.jsonl", "--heldout-share", "1"], "--heldout-share 1: input should be less than 1"),
        (["--near", "0"], "--near 0: input should be greater than 0"),
        (["--near", "1.01"], "--near 1.01: input should be less than or equal to 1"),
        (["--heldout-share", "0.1"], "name with --heldout where"),
        (["--heldout-limit", "5"], "name with --heldout where"),
        (["--limit", "0"], "--limit 0: input should be greater than or equal to 1"),
        (["--decontaminate", "nowhere.jsonl"], "there is no such file"),
    ],
)
def test_bad_requests_say_what_would_work(tmp_path: Path, options: list[str], problem: str) -> None:
    chats = write(tmp_path / "a.jsonl", {"prompt": "a"})
    refuse(main, [*words(tmp_path / "out.jsonl", chats), *options], problem)
    assert not (tmp_path / "out.jsonl").exists()


def test_nothing_usable_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    chats = write(tmp_path / "a.jsonl", {"conversations": []}, 5)
    refuse(
        main,
        words(tmp_path / "out.jsonl", chats),
        "not one prompt in 2 rows: 1 × empty conversation; 1 × not a JSON object",
    )
    (tmp_path / "a.jsonl").write_text("")
    refuse(main, words(tmp_path / "empty.jsonl", tmp_path / "a.jsonl"), "the input is empty")


def test_no_input_is_overwritten(tmp_path: Path) -> None:
    chats, own = write(tmp_path / "a.jsonl", {"prompt": "a"}), write(tmp_path / "eval.jsonl", {"prompt": "b"})
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "c.jsonl", {"prompt": "c"})
    out = tmp_path / "out.jsonl"
    for output, inputs, more, problem in (
        (chats, chats, {}, "is read as"),
        (own, chats, {"decontaminate": [own]}, "is read as"),
        (out, chats, {"heldout": chats}, "is read as"),
        (out, chats, {"heldout": f"{out}.dropped.jsonl"}, "name another file"),
        (folder / "out.jsonl", folder, {}, "all of which is read"),
    ):
        refuse(main, words(output, inputs, overwrite=True, **more), problem)
    assert [asked_of(path) for path in (chats, own, folder / "c.jsonl")] == ["a", "b", "c"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "data", "eval.jsonl"]


def asked_of(path: Path) -> str:
    (row,) = rows(path)
    return row["prompt"]


def test_an_output_where_a_link_of_an_input_folder_leads_is_refused(tmp_path: Path) -> None:
    folder, other = tmp_path / "in", tmp_path / "other"
    folder.mkdir(), other.mkdir()
    (folder / "link").symlink_to(other)
    write(folder / "a.jsonl", {"prompt": "a"})
    write(other / "b.jsonl", {"prompt": "b"})
    for out in (other / "out.jsonl", folder / "link" / "out.jsonl"):
        refuse(main, words(out, folder), "all of which is read")
    assert asked(select(tmp_path / "out.jsonl", folder)) == ["a", "b"]
