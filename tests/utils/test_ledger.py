"""A job's output: it continues after a kill, is never half there, and is never taken for another job's."""

from __future__ import annotations

import json
import os
import resource
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data_prep.pipeline.command import JobOptions, run_job
from data_prep.readers.inputs import Inputs
from specforge_dspine.utils.ledger import Ledger, LedgerError, LedgerWriteError
from tests.support import ROOT

INPUTS = {"target": "abc", "max_length": 512, "thinking": None}


def partial_of(path: Path) -> Path:
    """Where ``files.atomic_write`` of this process writes first."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def open_ledger(out: Path, **changed: Any) -> Ledger:
    return Ledger([out], "test", INPUTS | changed)


def keep(ledger: Ledger, *names: str) -> None:
    for name in names:
        ledger.keep(json.dumps({"name": name}).encode() + b"\n", key=hash(name) % (1 << 64))


def finished(out: Path) -> Path:
    with open_ledger(out) as ledger:
        keep(ledger, "ü1", "ü2")
        ledger.drop("file", 3, "invalid", "very")
        ledger.finish(3, {"fact": 7})
    return out


def test_a_finished_job_is_recognized_and_complete(tmp_path: Path) -> None:
    out = finished(tmp_path / "deep" / "out.jsonl")
    assert [json.loads(line)["name"] for line in out.read_text().splitlines()] == ["ü1", "ü2"]
    names = ["out.jsonl", "out.jsonl.dropped.jsonl", "out.jsonl.summary.json"]
    assert sorted(path.name for path in out.parent.iterdir()) == names
    summary = json.loads((out.parent / names[2]).read_text())
    assert (summary["rows_in"], summary["rows_kept"], summary["rows_dropped"]) == (3, 2, {"invalid": 1})
    assert summary["fact"] == 7
    dropped = json.loads((out.parent / names[1]).read_text())
    assert dropped == {"file": "file", "line": 3, "reason": "invalid", "detail": "very"}
    assert open_ledger(out).is_finished()


@pytest.mark.parametrize("changed", [{"max_length": 256}, {"thinking": False}, {"target": "xyz"}, {"new": 1}])
def test_every_changed_input_is_refused_by_name(tmp_path: Path, changed: dict[str, Any]) -> None:
    # Soup#1067: cached features were reused after the template, the length or the tokenizer had changed.
    out = finished(tmp_path / "out.jsonl")
    (name, value), *_ = changed.items()
    with pytest.raises(LedgerError, match=rf"{name} was .* and is now {value!r}.*--overwrite"):
        open_ledger(out, **changed).is_finished()
    ledger = Ledger([out], "test", INPUTS | changed, overwrite=True)
    assert not ledger.is_finished()
    with ledger:
        assert out.exists(), "until it is replaced"
        keep(ledger, "new")
        ledger.finish(1, {})
    assert open_ledger(out, **changed).is_finished() and json.loads(out.read_text())["name"] == "new"


def test_an_unfinished_job_with_other_inputs_is_refused_too(tmp_path: Path) -> None:
    with open_ledger(tmp_path / "out.jsonl") as ledger:
        keep(ledger, "a")
    with pytest.raises(LedgerError, match="target was 'abc'"), open_ledger(tmp_path / "out.jsonl", target="x"):
        pass


def test_unknown_and_altered_files_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine\n")
    with pytest.raises(LedgerError, match=r"exists without out\.jsonl\.summary\.json, so this command"):
        open_ledger(out).is_finished()
    out.unlink()
    finished(out).write_text("altered\n")
    with pytest.raises(LedgerError, match="changed after it was written"):
        open_ledger(out).is_finished()


@pytest.mark.parametrize("content", ["{}", "[]", "no JSON", '{"inputs": {}}'])
def test_an_unknown_summary_is_refused(tmp_path: Path, content: str) -> None:
    out = tmp_path / "out.jsonl"
    Path(f"{out}.summary.json").write_text(content)
    assert not open_ledger(out).is_own()
    with pytest.raises(LedgerError, match=r"summary\.json is not a summary .* wrote; give --overwrite"):
        open_ledger(out).is_finished()


def test_overwriting_keeps_the_old_result_and_continues_after_a_kill(tmp_path: Path) -> None:
    out = finished(tmp_path / "out.jsonl")
    old = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def begin(*names: str, **changed: Any) -> int:
        """Commits rows and stops, as if killed; returns how many were there already."""
        with Ledger([out], "test", INPUTS | changed, overwrite=True) as ledger:
            before = ledger.counts()[0]
            keep(ledger, *names)
            ledger.commit()
        return before

    assert [begin("a", "b", target="x"), begin("c", target="x")] == [0, 2]
    assert begin("d", target="y") == 0, "rows of other inputs are discarded"
    assert {name: (tmp_path / name).read_bytes() for name in old} == old
    partial_of(tmp_path / "out.jsonl.dropped.jsonl").symlink_to("/dev/full")
    atomic_write = Ledger([out], "test", INPUTS | {"target": "y"}, overwrite=True)
    with atomic_write, pytest.raises(LedgerWriteError, match="No space left"):
        atomic_write.drop("file", 1, "invalid", "")
        atomic_write.finish(2, {})
    assert {name: (tmp_path / name).read_bytes() for name in old} == old, "a full disk costs nothing, either"
    with Ledger([out], "test", INPUTS | {"target": "y"}, overwrite=True) as ledger:
        ledger.finish(2, {})
    assert json.loads(out.read_text()) == {"name": "d"} and open_ledger(out, target="y").is_finished()


@pytest.mark.parametrize("suffix", ["", ".summary.json", ".dropped.jsonl", ".partial"])
def test_what_is_read_is_never_written(tmp_path: Path, suffix: str) -> None:
    out = tmp_path / "out.jsonl"
    read = Path(f"{out}{suffix}")
    read.write_text("mine")
    (tmp_path / "link").symlink_to(read)
    for name in (read, tmp_path / "link", os.path.relpath(read)):
        with pytest.raises(LedgerError, match="would be written, but is read as"):
            Ledger([out], "test", INPUTS, reads=[name], overwrite=True)
    with pytest.raises(LedgerError, match=r"would be written into .* all of which is read"):
        Ledger([out], "test", INPUTS, reads=[tmp_path], overwrite=True)
    assert read.read_text() == "mine"


def test_outputs_and_their_side_files_are_different_files(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    for suffix in ("summary.json", "dropped.jsonl", "partial"):
        with pytest.raises(LedgerError, match=rf"is also to hold out\.jsonl\.{suffix} of .*; name another file"):
            Ledger([out, Path(f"{out}.{suffix}")], "test", INPUTS)
    with pytest.raises(LedgerError, match="names of their own"):
        Ledger([out, out], "test", INPUTS)
    (tmp_path / "other").symlink_to(out)
    with pytest.raises(LedgerError, match="name another file"):
        Ledger([out, tmp_path / "other"], "test", INPUTS)


def test_lost_rows_are_an_error(tmp_path: Path) -> None:
    with open_ledger(tmp_path / "out.jsonl") as ledger:
        keep(ledger, "a")
        with pytest.raises(RuntimeError, match="2 rows came in, 1 were kept and 0 dropped"):
            ledger.finish(2, {})
    assert not (tmp_path / "out.jsonl").exists()


KILLED = """
import os, sys
from pathlib import Path
from specforge_dspine.utils.ledger import Ledger
with Ledger([Path({out!r})], "test", {inputs!r}) as ledger:
    ledger.keep(b"committed\\n", key=2**64 - 1)
    ledger.set_fact("done", 1)
    ledger.commit()
    ledger.keep(b"not committed\\n" * 100000)
    ledger.set_fact("done", 2)
    os.kill(os.getpid(), 9)
"""


def test_what_was_committed_survives_a_kill_and_nothing_else_does(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    code = KILLED.format(out=str(out), inputs=INPUTS)
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert not out.exists()
    with open_ledger(out) as ledger:
        assert ledger.fact("done") == 1 and ledger.counts() == (1, {})
        assert ledger.has_key(2**64 - 1) and not ledger.has_key(0)
        ledger.finish(1, {})
    assert out.read_bytes() == b"committed\n"


def test_rows_come_in_the_order_of_their_places(tmp_path: Path) -> None:
    with open_ledger(tmp_path / "out.jsonl") as ledger:
        for place in (5, 1, 3):
            ledger.keep(b"%d\n" % place, place=place)
        ledger.finish(3, {})
    assert (tmp_path / "out.jsonl").read_bytes() == b"1\n3\n5\n"


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.dropped.jsonl", "out.jsonl.summary.json"])
def test_a_full_disk_at_the_end_loses_nothing(tmp_path: Path, name: str) -> None:
    out = tmp_path / "out.jsonl"
    partial_of(tmp_path / name).symlink_to("/dev/full")
    with open_ledger(out) as ledger:
        keep(ledger, *(str(number) for number in range(5000)))
        with pytest.raises(LedgerWriteError, match=r"No space left on device.*the same command finishes the work"):
            ledger.drop("file", 1, "invalid", "")
            ledger.finish(5001, {})
    assert not open_ledger(out).is_finished()
    with open_ledger(out) as ledger:
        ledger.finish(5001, {})
    assert open_ledger(out).is_finished() and len(out.read_text().splitlines()) == 5000


def limit_files_to(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_file_size_limit_on_the_way_loses_nothing_that_was_done(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"prompt": f"{number} " + "x" * 5000}) + "\n" for number in range(2000)))
    command = [sys.executable, "-m", "data_prep.prompts", "--input", str(chats), "--workers", "1"]
    command += ["--output", str(tmp_path / "out.jsonl")]
    small = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, preexec_fn=lambda: limit_files_to(6 << 20)
    )
    assert small.returncode == 1 and "make room, and the same command continues" in small.stderr
    assert "Traceback" not in small.stderr and not (tmp_path / "out.jsonl").exists()
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["line"] for row in rows] == list(range(1, 2001))


def test_what_is_no_file_is_not_replaced() -> None:
    with pytest.raises(LedgerError, match="/dev/full is not an ordinary file"):
        open_ledger(Path("/dev/full"))


def test_a_damaged_partial_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.partial").write_text("not a database, " * 100)
    with pytest.raises(LedgerError, match=r"out\.jsonl\.partial: .*--overwrite"), open_ledger(tmp_path / "out.jsonl"):
        pass
    with Ledger([tmp_path / "out.jsonl"], "test", INPUTS, overwrite=True) as ledger:
        assert ledger.counts() == (0, {})


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    with open_ledger(tmp_path / "out.jsonl"):
        for overwrite in (False, True):
            second = Ledger([tmp_path / "out.jsonl"], "test", INPUTS | {"new": 1}, overwrite=overwrite)
            with pytest.raises(LedgerError, match="another process"):
                second.__enter__()


def test_a_lost_table_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(LedgerWriteError, match="no such table"), open_ledger(tmp_path / "out.jsonl"):
        raise sqlite3.OperationalError("no such table: bands")


@pytest.mark.parametrize("command", ["prompts", "inspect"])
def test_a_job_whose_files_could_not_be_written_finishes_without_its_rows_twice(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows are in the ledger then, and so is that they are all."""
    out, work = tmp_path / "out", {"calls": 0}
    job = command, JobOptions(input=(), output=out), Inputs([], []), {}

    def once(opened: Ledger) -> dict[str, int]:
        work["calls"] += 1
        keep(opened, *(str(number) for number in range(50)))
        return {"rows_in": 50}

    partial_of(tmp_path / "out").mkdir()
    with pytest.raises(LedgerWriteError, match="the same command finishes the work"):
        run_job(*job, once)
    partial_of(tmp_path / "out").rmdir()
    assert run_job(*job, once).startswith("50 rows read, 50 kept")
    assert work["calls"] == 1 and len(out.read_text().splitlines()) == 50


def test_overwrite_keeps_a_partial_file_that_merely_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with Ledger([out], "x", {}) as ledger:
        keep(ledger, "a", "b")
        ledger.commit()
    again = Ledger([out], "x", {}, overwrite=True)
    with monkeypatch.context() as patched:
        patched.setattr(
            sqlite3, "connect", lambda *_, **__: (_ for _ in ()).throw(sqlite3.OperationalError("disk I/O error"))
        )
        with pytest.raises(LedgerError, match="disk I/O error"), again:
            pass
    with again as ledger:
        assert len(list(ledger.kept())) == 2
    Path(f"{out}.partial").write_bytes(b"no database at all, but long enough to be looked at" * 100)
    with again as ledger:
        assert not list(ledger.kept()), "what nobody can ever read is discarded"
