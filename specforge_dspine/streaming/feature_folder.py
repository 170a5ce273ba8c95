"""Folder of captured features: records, and a manifest of what they were made from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specforge_dspine.streaming.record import Sample, TargetIdentity
from specforge_dspine.utils.errors import InvalidFileError
from specforge_dspine.utils.files import as_json, atomic_write, model_fingerprint, read_json, write_json

MANIFEST = "manifest.json"


class FeatureFolderError(InvalidFileError):
    """A folder that does not hold the features that it should; the message says what differs and what to do."""


class FeatureFolder:
    """The output folder of a capture: its manifest, the records that it holds already, and what was dropped.

    Raises:
        FeatureFolderError: the folder was made from other inputs (what differs is named), or is no feature folder.
    """

    def __init__(self, path: Path, inputs: dict[str, Any]) -> None:
        self.path = path
        self.dropped: list[dict[str, str]] = []
        self._inputs = as_json(inputs)
        path.mkdir(parents=True, exist_ok=True)
        manifest = path / MANIFEST
        if manifest.exists():
            found = read_json(manifest).get("inputs", {})
            if differing := differences(found, dict.fromkeys(found) | self._inputs):
                raise FeatureFolderError(
                    f"{path} was captured from other inputs ({differing}); choose a new --out folder, or delete it"
                )
        elif any(path.iterdir()):
            raise FeatureFolderError(f"{path} is not empty and has no {MANIFEST}: choose a new --out folder")

    def has(self, sample: Sample) -> bool:
        """Is ``sample`` captured already?"""
        return self._file(sample).exists()

    def add(self, sample: Sample, record: Path) -> None:
        """Move a checked record here, under the sample's name."""
        try:
            os.replace(record, self._file(sample))
        except OSError:  # the server's directory is on another file system
            with record.open("rb") as source, atomic_write(self._file(sample), sync=False) as file:
                shutil.copyfileobj(source, file)
            record.unlink()

    def write_manifest(self, *, complete: bool) -> None:
        """Write what the folder holds and was made from."""
        count = sum(1 for _ in self.path.glob("*.ckpt"))
        content = {"inputs": self._inputs, "complete": complete, "count": count, "dropped": self.dropped}
        write_json(self.path / MANIFEST, content)

    def _file(self, sample: Sample) -> Path:
        return self.path / f"{sample.name}.ckpt"


def feature_name(path: str) -> str:
    """Return the sample's name, which is its content (``sample_name``), of a captured file."""
    return Path(path).name.split(".ckpt")[0]


def check_features(folder: Path, target: TargetIdentity) -> None:
    """Check the manifest that ``specforge_dspine.capture`` wrote against the target of a run.

    A folder without a manifest passes: widths, dtype and finite values are checked as batches arrive.

    Raises:
        FeatureFolderError: the features are of another target or other layers, or the capture is not finished.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return
    manifest = read_json(path)
    expected = as_json(asdict(target))
    del expected["model_path"]  # the content tells models apart, wherever they lie
    if Path(target.model_path).is_dir():
        expected["model_fingerprint"] = model_fingerprint(Path(target.model_path))
    if differing := differences(manifest.get("inputs", {}), expected):
        raise FeatureFolderError(
            f"the features in {str(folder)!r} were captured from another target or other layers ({differing}); "
            "capture again with python -m specforge_dspine.capture, or correct the recipe"
        )
    if not manifest.get("complete"):
        raise FeatureFolderError(f"{path}: the capture was not finished; run the same command again to continue it")


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Return in words which values of ``expected`` differ from those found; empty if none does."""
    return "; ".join(
        f"{key}: there {found.get(key)!r}, here {value!r}"
        for key, value in sorted(expected.items())
        if found.get(key) != value
    )
