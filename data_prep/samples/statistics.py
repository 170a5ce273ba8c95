"""Statistics of training samples: lengths, anchors, and problems to warn of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specforge_dspine.utils.chat_template import end_ids
from specforge_dspine.utils.errors import InvalidRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIGURES = ("tokens", "supervised tokens", "anchors")
EXAMPLES = 5  # places that a warning names
BINS = 12
FEW_ANCHORS = 8  # fewer make a sample hardly worth its capture


@dataclass(frozen=True)
class Sample:
    """One line of a samples file: S ids and a mask, and where they are from."""

    place: str
    input_ids: list[int]
    loss_mask: list[int]
    prompt_tokens: int | None
    finish: str | None
    origin: str | None

    @property
    def anchors(self) -> int:
        """Supervised tokens with a supervised one after them."""
        return sum(a and b for a, b in pairwise(self.loss_mask))

    @property
    def figures(self) -> tuple[int, int, int]:
        """Tokens, supervised tokens, anchors."""
        return len(self.input_ids), sum(self.loss_mask), self.anchors


def read_sample(place: str, entry: Any) -> Sample:
    """The sample in a row; an InvalidRow if there is none in it."""
    if isinstance(entry, InvalidRow):
        raise entry
    if not isinstance(entry, dict):
        raise InvalidRow("not a JSON object", type(entry).__name__)
    ids, mask = entry.get("input_ids"), entry.get("loss_mask")
    if ids is None or mask is None:
        raise InvalidRow("no input_ids or loss_mask", f"has {', '.join(sorted(entry))[:200]}")
    if not all(isinstance(values, list) and all(type(value) is int for value in values) for values in (ids, mask)):
        raise InvalidRow("ids are not lists of integers", "input_ids, loss_mask")
    if len(ids) != len(mask) or not ids:
        raise InvalidRow("ids and mask differ in length", f"{len(ids)} and {len(mask)}")
    if not set(mask) <= {0, 1}:
        raise InvalidRow("the mask holds other values than 0 and 1", f"{sorted(set(mask))[:5]}")
    prompt, finish, origin = (entry.get(name) for name in ("prompt_tokens", "finish", "origin"))
    if prompt is not None and type(prompt) is not int:
        raise InvalidRow("prompt_tokens is not a number", f"{prompt!r}")
    if not all(text is None or isinstance(text, str) for text in (finish, origin)):
        raise InvalidRow("finish or origin is not text", f"{finish!r}, {origin!r}")
    return Sample(place, ids, mask, prompt, finish, origin)


@dataclass(frozen=True)
class TargetVocabulary:
    """A target's vocabulary of size V, and the ids with a role; ``marker_ids`` are written by the template alone."""

    size: int
    end_ids: frozenset[int]
    pad_id: int | None
    mask_id: int | None
    marker_ids: frozenset[int]

    @classmethod
    def of(cls, path: Path, tokenizer: PreTrainedTokenizerBase, size: int, mask_id: int | None) -> TargetVocabulary:
        """The vocabulary of the target in the folder ``path``."""
        ends, pad = end_ids(path, tokenizer), tokenizer.pad_token_id
        pad_id = None if pad in ends else pad  # many targets end with their pad token
        return cls(size, ends, pad_id, mask_id, frozenset(tokenizer.all_special_ids) - ends)


@dataclass
class SampleStatistics:
    """Counts over all samples; ``warnings`` holds the first places of each problem, ``counts`` how many there are."""

    vocabulary: TargetVocabulary
    target: str  # its fingerprint
    samples: int = 0
    series: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in FIGURES})
    origins: Counter[str] = field(default_factory=Counter)
    finishes: Counter[str] = field(default_factory=Counter)
    warnings: dict[str, list[str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, sample: Sample) -> None:
        """Count one more sample."""
        problems = self.problems(sample)  # first: if it fails, nothing was counted
        self.samples += 1
        for values, value in zip(self.series.values(), sample.figures, strict=True):
            values.append(value)
        self.origins[sample.origin or "unknown"] += 1
        self.finishes[sample.finish or "unknown"] += 1
        for problem in problems:
            self.counts[problem] += 1
            places = self.warnings.setdefault(problem, [])
            if len(places) < EXAMPLES:
                places.append(sample.place)

    def problems(self, sample: Sample) -> list[str]:
        """All problems of a sample, each kind in the same words."""
        vocabulary, ids, mask = self.vocabulary, sample.input_ids, sample.loss_mask
        supervised = [token for token, is_supervised in zip(ids, mask, strict=True) if is_supervised]
        found = {
            "no supervised token": not supervised,
            "no anchor: no two supervised tokens in a row": bool(supervised) and not sample.anchors,
            f"fewer than {FEW_ANCHORS} anchors": 0 < sample.anchors < FEW_ANCHORS,
            "the mask covers the prompt": sample.prompt_tokens is not None and any(mask[: sample.prompt_tokens]),
            "everything is supervised, there is no prompt": all(mask),
            "the response is not from this target": sample.origin != self.target,
            "ids outside of the vocabulary": not 0 <= min(ids) <= max(ids) < vocabulary.size,
            "the mask token occurs": vocabulary.mask_id is not None and vocabulary.mask_id in ids,
            "padding is supervised": vocabulary.pad_id is not None and vocabulary.pad_id in supervised,
            "the template's markers are supervised": not vocabulary.marker_ids.isdisjoint(supervised),
            "an end token is supervised before the response ends": not vocabulary.end_ids.isdisjoint(supervised[:-1]),
            "ends by itself, but its end is not supervised": sample.finish == "stop"
            and bool(supervised)
            and supervised[-1] not in vocabulary.end_ids,
        }
        return [problem for problem, is_so in found.items() if is_so]

    def summary(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return {
            "samples": self.samples,
            **{name.replace(" ", "_"): sum(values) for name, values in self.series.items()},
            "origins": dict(self.origins),
            "finishes": dict(self.finishes),
            "histograms": {name: histogram(values) for name, values in self.series.items()},
            "warnings": dict(self.counts),
        }


def histogram(values: list[int]) -> list[tuple[int, int, int]]:
    """Ranges from–to, ends included, and how many values lie in each."""
    low, high = min(values), max(values)
    width = max(1, -(-(high - low + 1) // BINS))
    counts = Counter((value - low) // width for value in values)
    last = (high - low) // width
    return [(low + k * width, low + (k + 1) * width - 1, counts[k]) for k in range(last + 1)]
