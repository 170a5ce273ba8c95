"""The output of a long job, which survives a kill, is never half there, and is never mistaken for another job's.

Until a job is done its rows are in one SQLite file, ``OUTPUT.partial``, together with how far it has come. What was
committed is there after a kill, and nothing else is. Then ``OUTPUT.dropped.jsonl``, further outputs and ``OUTPUT``
appear, each whole, and last of all ``OUTPUT.summary.json``: every input that they depend on, the rows counted, and a
hash of each file. Rows that came in are rows kept and rows dropped, or the job does not end. What a job replaces
stays until then.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Any

from specforge_dspine.utils.errors import RunError
from specforge_dspine.utils.files import as_json, atomic_write, differences, file_sha256, to_line, write_json

SHOWN_CHANGES = 6  # changed inputs that a message names; the others are counted
ENDED = "ended"
SCHEMA = """
PRAGMA page_size = 16384;
PRAGMA locking_mode = EXCLUSIVE;  -- the kernel lifts the lock when the process ends
PRAGMA synchronous = NORMAL;
PRAGMA cache_size = -65536;
BEGIN EXCLUSIVE;
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS kept (place INTEGER PRIMARY KEY, output INTEGER, key INTEGER UNIQUE, line BLOB);
CREATE TABLE IF NOT EXISTS dropped (place INTEGER PRIMARY KEY, reason TEXT, line BLOB);
COMMIT;
"""


class LedgerError(ValueError):
    """The output belongs to another job, or must not be written; the message says what to do."""


class UselessLedgerError(LedgerError):
    """What is there is damaged or was made from other inputs: the job cannot continue it, only discard it."""


class LedgerWriteError(RunError):
    """The disk does not take the rows, or the files; the same command continues once it does."""


class Ledger:
    """The rows of one job, for one process at a time: ``is_finished``, then ``with ledger:``.

    Args:
        outputs: the final files; the first is ``OUTPUT``.
        command: the job's kind.
        inputs: JSON values that decide the content; only a job with the same ones continues.
        reads: files and folders that are read; none of them may be written.
        overwrite: replaces what is there, once the job is done; a partial file of other inputs is discarded.

    Raises:
        LedgerError: a file would be written that is read, or written twice, or is no ordinary file.
    """

    def __init__(
        self,
        outputs: Sequence[Path],
        command: str,
        inputs: Mapping[str, Any],
        *,
        reads: Iterable[str | Path] = (),
        overwrite: bool = False,
    ) -> None:
        self.outputs = list(outputs)
        self.output = self.outputs[0]
        self._inputs = as_json({"command": command, **inputs})
        suffixes = ("summary.json", "dropped.jsonl", "partial", "partial-journal")  # the last is SQLite's own
        self._beside = [self.output.with_name(f"{self.output.name}.{suffix}") for suffix in suffixes]
        self.summary_path, self.dropped_path, self._partial_path, self._journal_path = self._beside
        self.overwrite = overwrite
        self._advice = f"give --overwrite to replace {self.output}, or name another file"
        self._db: sqlite3.Connection | None = None
        self._check_paths(reads)

    @property
    def db(self) -> sqlite3.Connection:
        """The database of the rows, inside of the context; an index of the job's own may be there too."""
        assert self._db is not None, "for use inside of the context"
        return self._db

    def is_finished(self) -> bool:
        """Whether the outputs are the whole result of these inputs.

        Raises:
            LedgerError: they are from other inputs (the message says which), or changed since, or not from a ledger.
        """
        if self.overwrite:
            return False
        if not self.summary_path.exists():
            for path in self.outputs:
                if path.exists() and not self._partial_path.exists():
                    raise LedgerError(
                        f"{path} exists without {self.summary_path.name}, so this command did not write it; "
                        f"{self._advice}"
                    )
            return False
        summary = self._summary()
        if summary is None:
            raise LedgerError(f"{self.summary_path} is not a summary that this command wrote; {self._advice}")
        self._compare(summary["inputs"])
        for path in (*self.outputs, self.dropped_path):
            if not path.exists() or file_sha256(path) != summary["sha256"].get(path.name):
                raise LedgerError(f"{path} is gone or was changed after it was written; {self._advice}")
        return True

    def is_own(self) -> bool:
        """Whether the output was made by the same command, from whatever inputs."""
        summary = self._summary()
        return summary is not None and summary["inputs"].get("command") == self._inputs["command"]

    def _summary(self) -> dict[str, Any] | None:
        """The summary that is there, if it is one of a ledger."""
        try:
            found = json.loads(self.summary_path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        is_own = isinstance(found, dict) and all(isinstance(found.get(name), dict) for name in ("inputs", "sha256"))
        return found if is_own else None

    def _check_paths(self, reads: Iterable[str | Path]) -> None:
        """By real path, so that no link hides that two names are one file."""
        if len({path.name for path in self.outputs}) < len(self.outputs):
            raise LedgerError(f"{' and '.join(map(str, self.outputs))}: give the files names of their own")
        read = {Path(os.path.realpath(path)): path for path in reads}
        written: dict[Path, Path] = {}
        for path in (*self._beside, *self.outputs):
            real = Path(os.path.realpath(path))
            if real in written:
                raise LedgerError(f"{path} is also to hold {written[real].name} of {self.output}; name another file")
            if real in read:
                raise LedgerError(f"{path} would be written, but is read as {read[real]}; name another output")
            folder = next((read[parent] for parent in real.parents if parent in read), None)
            if folder is not None:
                raise LedgerError(
                    f"{path} would be written into {folder}, all of which is read, and the next run would read it; "
                    "name an output elsewhere, or single files as inputs"
                )
            if path.exists() and not path.is_file():
                raise LedgerError(f"{path} is not an ordinary file; name a file that can be written and replaced")
            written[real] = path

    def _compare(self, was: Mapping[str, Any]) -> None:
        changes = [f"{name} was {then!r} and is now {now!r}" for name, then, now in differences(was, self._inputs)]
        if changes:
            more = f"; and {len(changes) - SHOWN_CHANGES} more" if len(changes) > SHOWN_CHANGES else ""
            shown = "; ".join(changes[:SHOWN_CHANGES]) + more
            raise UselessLedgerError(f"{self.output} is from other inputs: {shown}. To go on, {self._advice}")

    def __enter__(self) -> Ledger:
        """Open what an earlier run left, or begin.

        Raises:
            LedgerError: another process works on it, it is from other inputs, or it is damaged.
        """
        try:
            self._open()
        except UselessLedgerError:
            if not self.overwrite:
                raise
            for path in (self._partial_path, self._journal_path):
                path.unlink(missing_ok=True)
            self._open()
        return self

    def _open(self) -> None:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(self._partial_path, timeout=0)
            self._db.executescript(SCHEMA)
            if was := self.fact("inputs"):
                self._compare(was)
            else:
                self.set_fact("inputs", self._inputs)
                self.commit()
        except (sqlite3.Error, LedgerError) as error:
            self._close()
            if isinstance(error, LedgerError):
                raise
            if "locked" in str(error):
                raise LedgerError(
                    f"another process is writing {self.output}; wait for it or name another file"
                ) from None
            if "not a database" in str(error):
                raise UselessLedgerError(f"{self._partial_path}: {error}; {self._advice}") from error
            raise LedgerError(
                f"{self._partial_path}: {error} (no permission, no room, or damaged?). Fix that, and the same "
                "command continues"
            ) from error

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()  # what was not committed is rolled back
            self._db = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        if isinstance(error, sqlite3.Error):
            raise LedgerWriteError(
                f"{self._partial_path}: {error} (is the disk full, or a file size limit reached?). Nothing of what "
                "was committed is lost: make room, and the same command continues"
            ) from error

    def keep(self, line: bytes, *, output: int = 0, place: int | None = None, key: int | None = None) -> None:
        """Keep a line for the output of that number; in the order of ``place``, by default as they come.

        ``key`` is 64 bits that no other row has; ``has_key`` finds it, in a continued job too.
        """
        signed = None if key is None else _signed(key)
        self.db.execute("INSERT INTO kept VALUES (?, ?, ?, ?)", (place, output, signed, line))

    def has_key(self, key: int) -> bool:
        """Whether a row with this key was kept."""
        return self.db.execute("SELECT 1 FROM kept WHERE key = ?", (_signed(key),)).fetchone() is not None

    def drop(
        self, file: str, line: int | None, reason: str, detail: str, *, place: int | None = None, **more: Any
    ) -> None:
        """Note a row that is left out: where it is and why."""
        row = {"file": file, "line": line, "reason": reason, "detail": detail, **more}
        self.db.execute("INSERT INTO dropped VALUES (?, ?, ?)", (place, reason, to_line(row)))

    def fact(self, name: str) -> Any:
        """The value that ``set_fact`` noted, in an earlier run too; None if none."""
        row = self.db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def set_fact(self, name: str, value: Any) -> None:
        """Note a JSON value, which lasts as the rows beside it do."""
        self.db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    def commit(self) -> None:
        """Make everything up to here last, whatever happens."""
        self.db.commit()

    def kept(self) -> Iterator[Any]:
        """The rows kept so far, in their order, as JSON values."""
        return (json.loads(line) for (line,) in self.db.execute("SELECT line FROM kept ORDER BY place"))

    def ended(self) -> dict[str, Any] | None:
        """The arguments of a ``finish`` that could not write its files: all rows are there, none is to come."""
        found: dict[str, Any] | None = self.fact(ENDED)
        return found

    def counts(self) -> tuple[int, dict[str, int]]:
        """Rows kept, and rows dropped by reason, most first."""
        (kept,) = self.db.execute("SELECT COUNT(*) FROM kept").fetchone()
        reasons = self.db.execute("SELECT reason, COUNT(*) FROM dropped GROUP BY reason ORDER BY 2 DESC, 1")
        return kept, dict(reasons.fetchall())

    def kept_by_output(self) -> list[int]:
        """Rows kept for each output."""
        found = dict(self.db.execute("SELECT output, COUNT(*) FROM kept GROUP BY output").fetchall())
        return [found.get(number, 0) for number in range(len(self.outputs))]

    def reasons(self) -> str:
        """Why rows were dropped, in one line."""
        dropped = self.counts()[1]
        return "; ".join(f"{number} × {reason}" for reason, number in dropped.items()) or "the input is empty"

    def finish(self, rows_in: int, facts: Mapping[str, Any], *, rows_kept: int | None = None) -> dict[str, Any]:
        """Write the final files and return the summary; ``facts`` go into it.

        ``rows_kept`` is for outputs that are no rows.

        Raises:
            LedgerWriteError: a file cannot be written.
            RuntimeError: rows were lost on the way: an error in this program.
        """
        kept, dropped = self.counts()
        summary: dict[str, Any] = {
            "inputs": self._inputs,
            "rows_in": rows_in,
            "rows_kept": kept,
            "rows_dropped": dropped,
        }
        if rows_kept is None:
            names = [path.name for path in self.outputs]
            summary["rows_by_file"] = dict(zip(names, self.kept_by_output(), strict=True))
        else:
            summary["rows_kept"] = kept = rows_kept
        if rows_in != kept + sum(dropped.values()):
            raise RuntimeError(f"{rows_in} rows came in, {kept} were kept and {sum(dropped.values())} dropped")
        self.set_fact(ENDED, {"rows_in": rows_in, "facts": dict(facts), "rows_kept": rows_kept})
        self.commit()
        lines = {
            path: f"SELECT line FROM kept WHERE output = {number} ORDER BY place"
            for number, path in enumerate(self.outputs)
        }
        lines[self.dropped_path] = "SELECT line FROM dropped ORDER BY place"
        hashes: dict[str, str] = {}
        try:
            with ExitStack() as stack:  # all are written before the first takes its place
                for path, query in lines.items():
                    file = stack.enter_context(atomic_write(path))
                    with closing(self.db.execute(query)) as rows:  # left open, it would hold the lock
                        file.writelines(line for (line,) in rows)
                    file.flush()
                    hashes[path.name] = file_sha256(Path(file.name))
                self.summary_path.unlink(missing_ok=True)  # from here on the old result is no longer whole
            summary |= {**facts, "sha256": hashes}
            write_json(self.summary_path, summary)
        except OSError as error:
            raise LedgerWriteError(
                f"{error.filename or self.output}: {error.strerror or error}. The rows are safe in "
                f"{self._partial_path}: make room, and the same command finishes the work"
            ) from error
        self._partial_path.unlink()
        return summary


def _signed(key: int) -> int:
    """A key of 64 bits as SQLite's integers are."""
    return key - (1 << 63)
