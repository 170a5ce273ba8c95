"""Captured features on disk: samples to capture, the folder's manifest, and its check against a recipe."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specforge_dspine.streaming.record import Sample, SampleNames, TargetIdentity
from specforge_dspine.utils.errors import RecipeError
from specforge_dspine.utils.fingerprint import model_fingerprint

MANIFEST = "manifest.json"


class CaptureError(RuntimeError):
    """The capture cannot go on; the message says why and what to do."""


def read_samples(path: Path, vocab_size: int, max_length: int | None) -> tuple[list[Sample], list[dict[str, str]]]:
    """Samples of a JSONL file, named by content, and a note on every line that holds none.

    Sequences are cut after ``max_length`` tokens, which changes nothing for the tokens before. Each note has
    the keys ``sample`` (the line) and ``reason``.
    """
    samples: list[Sample] = []
    dropped: list[dict[str, str]] = []
    names = SampleNames()
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                ids, mask = _parse_line(line, vocab_size, max_length)
            except ValueError as error:
                dropped.append({"sample": f"line {number}", "reason": str(error)})
                continue
            samples.append(Sample(names.next(ids, mask), ids, mask))
    return samples, dropped


def _parse_line(line: str, vocab_size: int, max_length: int | None) -> tuple[list[int], list[int]]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from None
    ids, mask = _integers(row, "input_ids"), _integers(row, "loss_mask")
    Sample("unnamed", ids, mask)  # raises for unequal lengths and foreign mask values
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(f"input_ids from {min(ids)} to {max(ids)}, but the target knows 0 to {vocab_size - 1}")
    ids, mask = ids[:max_length], mask[:max_length]
    if 1 not in mask:
        raise ValueError("no token to train on" + (f" within {max_length} tokens" if max_length else ""))
    return ids, mask


def _integers(row: Any, key: str) -> list[int]:
    values = row.get(key) if isinstance(row, dict) else None
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise ValueError(f"{key} must be a list of integers")
    return values


class FeatureFolder:
    """The output folder: its manifest, what it holds already, and what was dropped.

    Raises:
        CaptureError: the folder belongs to other inputs (what differs is named), or is no feature folder.
    """

    def __init__(self, path: Path, inputs: dict[str, Any]) -> None:
        self.path = path
        self.dropped: list[dict[str, str]] = []
        self._inputs = json.loads(json.dumps(inputs))  # tuples become lists, as in the file
        path.mkdir(parents=True, exist_ok=True)
        manifest = path / MANIFEST
        if manifest.exists():
            self._compare(json.loads(manifest.read_text())["inputs"])
        elif any(path.iterdir()):
            raise CaptureError(f"{path} is not empty and has no {MANIFEST}: choose a new --out folder")

    def _compare(self, found: dict[str, Any]) -> None:
        differing = [
            f"{key}: there {found.get(key)!r}, now {self._inputs.get(key)!r}"
            for key in sorted(found.keys() | self._inputs.keys())
            if found.get(key) != self._inputs.get(key)
        ]
        if differing:
            raise CaptureError(
                f"{self.path} was captured from other inputs ({'; '.join(differing)}); choose a new --out "
                "folder, or delete this one"
            )

    def has(self, sample: Sample) -> bool:
        """Whether ``sample`` is captured already."""
        return self._file(sample).exists()

    def add(self, sample: Sample, record: Path) -> None:
        """Moves a checked record here, under the sample's name."""
        try:
            os.replace(record, self._file(sample))
        except OSError:  # the server's directory is on another file system
            temporary = self.path / f".{sample.name}.tmp"
            shutil.copyfile(record, temporary)
            os.replace(temporary, self._file(sample))
            record.unlink()

    def write_manifest(self, *, complete: bool) -> None:
        """What the folder holds and was made from, atomically."""
        content = {
            "inputs": self._inputs,
            "complete": complete,
            "count": sum(1 for _ in self.path.glob("*.ckpt")),
            "dropped": self.dropped,
        }
        temporary = self.path / f".{MANIFEST}.tmp"
        temporary.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(temporary, self.path / MANIFEST)

    def _file(self, sample: Sample) -> Path:
        return self.path / f"{sample.name}.ckpt"


def feature_name(path: str) -> str:
    """The sample's name, which is its content (``stream.record.sample_name``), of a captured file."""
    return Path(path).name.split(".ckpt")[0]


def check_features(folder: Path, target: TargetIdentity) -> None:
    """A folder that ``specforge_dspine.capture`` wrote says what it holds; it must be this recipe's. Of features of
    another origin, widths, dtype and finiteness are checked as batches arrive.

    Raises:
        RecipeError: they were captured from another target or other layers, or the capture is not finished.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return
    manifest = json.loads(path.read_text(encoding="utf-8"))
    expected = json.loads(json.dumps(asdict(target)))  # tuples become lists, as in the file
    del expected["model_path"]  # the content tells models apart, wherever they lie
    if Path(target.model_path).is_dir():
        expected["model_fingerprint"] = model_fingerprint(Path(target.model_path))
    found = manifest["inputs"]
    differing = [f"{k}: there {found.get(k)!r}, here {v!r}" for k, v in expected.items() if found.get(k) != v]
    if differing:
        raise RecipeError(
            f"the features in {str(folder)!r} were captured from another target or other layers "
            f"({'; '.join(differing)}); capture again with python -m specforge_dspine.capture, or correct the recipe"
        )
    if not manifest["complete"]:
        raise RecipeError(f"{path}: the capture was not finished; run the same command again to continue it")
