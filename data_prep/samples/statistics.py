"""What is worth knowing about training samples: lengths, anchors, and whatever is odd about them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from specforge_dspine.utils.invalid_row import InvalidRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXAMPLES = 5
"""Places that a warning names."""

BINS = 12

FEW_ANCHORS = 8
"""Fewer make a sample hardly worth its capture."""


@dataclass(frozen=True)
class Sample:
    """One line of a samples file: S ids and a mask, and what is said of them."""

    place: str
    input_ids: list[int]
    loss_mask: list[int]
    prompt_tokens: int | None
    finish: str | None
    origin: str | None

    @property
    def supervised(self) -> int:
        """Tokens with mask 1."""
        return sum(self.loss_mask)

    @property
    def anchors(self) -> int:
        """Supervised tokens with a supervised one behind them."""
        return sum(a and b for a, b in pairwise(self.loss_mask))


def read_sample(place: str, entry: Any) -> Sample:
    """The sample in a row.

    Raises:
        InvalidRow: there is none in it.
    """
    if isinstance(entry, InvalidRow):
        raise entry
    if not isinstance(entry, dict):
        raise InvalidRow("not a JSON object", type(entry).__name__)
    lists = [entry.get(name) for name in ("input_ids", "loss_mask")]
    if any(values is None for values in lists):
        raise InvalidRow("no input_ids or loss_mask", f"has {', '.join(sorted(entry))[:200]}")
    ids, mask = lists
    if not all(isinstance(values, list) and all(type(value) is int for value in values) for values in lists):
        raise InvalidRow("ids are not lists of integers", "input_ids, loss_mask")
    assert ids is not None and mask is not None
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
class Known:
    """What is known of the target's vocabulary: V rows, and ids with a role."""

    rows: int
    end_ids: frozenset[int]
    pad_id: int | None
    mask_id: int | None
    opening_ids: frozenset[int]
    fingerprint: str

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        rows: int,
        end_ids: frozenset[int],
        mask_id: int | None,
        fingerprint: str,
    ) -> Known:
        """``opening_ids`` are special tokens that no answer ends with: the template writes them."""
        pad = tokenizer.pad_token_id
        special = frozenset(tokenizer.all_special_ids) - end_ids
        return cls(rows, end_ids, None if pad in end_ids else pad, mask_id, special, fingerprint)


@dataclass
class Findings:
    """Counts over all samples; :attr:`warnings` by kind, with how many and the first places."""

    known: Known
    samples: int = 0
    lengths: list[int] = field(default_factory=list)
    supervised: list[int] = field(default_factory=list)
    anchors: list[int] = field(default_factory=list)
    origins: Counter[str] = field(default_factory=Counter)
    finishes: Counter[str] = field(default_factory=Counter)
    warnings: dict[str, list[str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, sample: Sample) -> None:
        """Looks at one more sample."""
        problems = self.problems(sample)  # first: if it fails, nothing was counted
        self.samples += 1
        self.lengths.append(len(sample.input_ids))
        self.supervised.append(sample.supervised)
        self.anchors.append(sample.anchors)
        self.origins[sample.origin or "unknown"] += 1
        self.finishes[sample.finish or "unknown"] += 1
        for problem in problems:
            self.counts[problem] += 1
            places = self.warnings.setdefault(problem, [])
            if len(places) < EXAMPLES:
                places.append(sample.place)

    def problems(self, sample: Sample) -> list[str]:
        """Everything odd about a sample, in words that are the same for each of its kind."""
        known = self.known
        taught = [token for token, mask in zip(sample.input_ids, sample.loss_mask, strict=True) if mask]
        found = {
            "no supervised token": not taught,
            "no anchor: no two supervised tokens in a row": bool(taught) and not sample.anchors,
            f"fewer than {FEW_ANCHORS} anchors": 0 < sample.anchors < FEW_ANCHORS,
            "the mask covers the prompt": _covers_prompt(sample),
            "everything is supervised, there is no prompt": all(sample.loss_mask),
            "the answer is not from this target": sample.origin != known.fingerprint,
            "ids outside of the vocabulary": not 0 <= min(sample.input_ids) <= max(sample.input_ids) < known.rows,
            "the mask token occurs": known.mask_id is not None and known.mask_id in sample.input_ids,
            "padding is supervised": known.pad_id is not None and known.pad_id in taught,
            "the template's markers are supervised": not known.opening_ids.isdisjoint(taught),
            "an end token is supervised before the answer ends": not known.end_ids.isdisjoint(taught[:-1]),
            "ends by itself, but its end is not supervised": sample.finish == "stop"
            and bool(taught)
            and taught[-1] not in known.end_ids,
        }
        return [problem for problem, is_so in found.items() if is_so]

    def summary(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return {
            "samples": self.samples,
            "tokens": sum(self.lengths),
            "supervised_tokens": sum(self.supervised),
            "anchors": sum(self.anchors),
            "origins": dict(self.origins),
            "finishes": dict(self.finishes),
            "histograms": {name: histogram(values) for name, values in self.series().items()},
            "warnings": {problem: self.counts[problem] for problem in self.warnings},
        }

    def series(self) -> dict[str, list[int]]:
        """What histograms are drawn of, by name."""
        return {"tokens": self.lengths, "supervised tokens": self.supervised, "anchors": self.anchors}


def histogram(values: list[int]) -> list[tuple[int, int, int]]:
    """Ranges from–to and how many values lie in each, ends included."""
    low, high = min(values), max(values)
    width = max(1, -(-(high - low + 1) // BINS))
    counts = Counter((value - low) // width for value in values)
    last = (high - low) // width
    return [(low + k * width, low + (k + 1) * width - 1, counts[k]) for k in range(last + 1)]


def _covers_prompt(sample: Sample) -> bool:
    prompt = sample.prompt_tokens
    return prompt is not None and any(sample.loss_mask[:prompt])
