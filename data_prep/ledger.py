"""The output file of a long job: it survives a kill, and is never mistaken for another job's.

Beside ``OUT`` stand ``OUT.meta.json``, every input that its content depends on, and until the job is done
``OUT.partial``, one line per finished batch. A kill leaves at most a cut last line there, which is dropped.
``OUT`` itself appears at the end, whole.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from data_prep.files import file_sha256, to_line, write_jsonl, write_text

Record = dict[str, Any]
Key = tuple[str, int]


class Ledger:
    """The records of one job, for one process at a time: ``is_finished``, then ``with ledger:``.

    Args:
        out: the final file.
        inputs: JSON values that decide the content; only a job with the same ones continues.
        key: under which a record is found in ``records``.

    Attributes:
        records: inside of the context, all that is finished, also by earlier runs of the same job.
    """

    def __init__(self, out: Path, inputs: Mapping[str, Any], key: Callable[[Record], Key]) -> None:
        self.out = out
        self.records: dict[Key, Record] = {}
        self._inputs = dict(inputs)
        self._key = key
        self._meta_path = out.with_name(out.name + ".meta.json")
        self._partial_path = out.with_name(out.name + ".partial")
        self._partial: BinaryIO | None = None

    def is_finished(self) -> bool:
        """Whether ``out`` is the whole result of these inputs.

        Raises:
            ValueError: ``out`` is from other inputs (the message says which), or changed since, or foreign.
        """
        advice = f"give --overwrite to replace {self.out}, or name another file"
        if not self._meta_path.exists():
            if self.out.exists():
                raise ValueError(f"{self.out} is there without {self._meta_path.name}: not from here; {advice}")
            return False
        meta = json.loads(self._meta_path.read_text(encoding="utf-8"))
        was = meta["inputs"]
        changed = [
            f"{name} was {was.get(name)!r} and is now {self._inputs.get(name)!r}"
            for name in sorted(was.keys() | self._inputs.keys())
            if was.get(name) != self._inputs.get(name)
        ]
        if changed:
            raise ValueError(f"{self.out} is from other inputs: {'; '.join(changed)}. To go on, {advice}")
        if not self.out.exists() or "sha256" not in meta:  # the latter: killed in the middle of finish()
            return False
        if file_sha256(self.out) != meta["sha256"]:
            raise ValueError(f"{self.out} was changed after it was written; {advice}")
        return True

    def discard(self) -> None:
        """Removes whatever is there."""
        with self._locked():
            for path in (self._meta_path, self.out, self._partial_path):
                path.unlink(missing_ok=True)

    def __enter__(self) -> Ledger:
        """Reads what an earlier run left.

        Raises:
            ValueError: another process works on ``out``, or the partial file is damaged before its end.
        """
        self._partial = self._locked()
        write_text(self._meta_path, json.dumps({"inputs": self._inputs}, indent=2) + "\n")
        self._partial.seek(0)
        whole = 0
        for number, line in enumerate(self._partial, 1):
            if not line.endswith(b"\n"):
                break  # cut by a kill
            try:
                batch = json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"{self._partial_path}, line {number} is damaged ({error}); start anew with --overwrite"
                ) from error
            self._add(batch)
            whole += len(line)
        self._partial.truncate(whole)
        self._partial.seek(whole)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._partial is not None
        self._partial.close()

    def append(self, batch: Sequence[Record]) -> None:
        """Keeps the records of one batch, all or none of them."""
        assert self._partial is not None, "append is for use inside of the context"
        self._partial.write(to_line(batch).encode())
        self._partial.flush()
        self._add(batch)

    def finish(self, rows: Iterable[Record], facts: Mapping[str, Any]) -> None:
        """Writes ``rows`` to ``out``, and ``facts`` about them beside the inputs."""
        write_jsonl(self.out, rows)
        meta = {"inputs": self._inputs, "sha256": file_sha256(self.out), **facts}
        write_text(self._meta_path, json.dumps(meta, indent=2, ensure_ascii=False) + "\n")
        self._partial_path.unlink()

    def _add(self, batch: Sequence[Record]) -> None:
        self.records.update((self._key(record), record) for record in batch)

    def _locked(self) -> BinaryIO:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        file = self._partial_path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lifts it when the process ends
        except BlockingIOError:
            file.close()
            raise ValueError(f"another process is writing {self.out}; wait for it or name another file") from None
        return file
