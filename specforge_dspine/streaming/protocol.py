"""Agreement between client and capture plugin: names, keys, and how a loss mask travels.

The plugin imports this module inside SGLang's scheduler: torch and the standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import torch

PROTOCOL = 1
"""Number of the request and response format; client and plugin refuse each other when it differs."""

CAPTURE_KEY = "specforge_dspine"
"""Our key in a request's ``sampling_params.custom_params`` and in the response's ``meta_info``."""

CAPTURE_DIR_ENV = "SPECFORGE_DSPINE_CAPTURE_DIR"
"""Server environment: the one directory the plugin writes to; unset means no capture at all."""

CAPTURE_LAYERS_ENV = "SPECFORGE_DSPINE_CAPTURE_LAYERS"
"""Server environment: ids of the tapped layers, for example ``1,9,17``."""

_SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


def check_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return tapped layer ids as a tuple, or raise ``ValueError`` if SGLang would not capture exactly these.

    SGLang appends states in layer order, merges duplicates, and drops the last layer silently. So the ids must be
    strictly increasing within 0 … num_layers − 2.
    """
    ids, last, problem = tuple(layers), num_layers - 1, ""
    if not ids:
        problem = "the list is empty"
    elif any(type(k) is not int for k in ids):
        problem = "every id must be an integer"
    elif any(a >= b for a, b in pairwise(ids)):
        problem = "the ids must increase without duplicates"
    elif last in ids:
        problem = f"{last} is the last layer, which the server cannot tap (its normed output is recorded anyway)"
    elif outside := [k for k in ids if not 0 <= k < last]:
        problem = f"{outside[0]} is out of range"
    if problem:
        raise ValueError(
            f"layers = {list(ids)}: {problem}; give strictly increasing ids from 0 to {last - 1} "
            f"(this target has {num_layers} layers)"
        )
    return ids


def safe_name(name: str) -> str:
    """Return ``name`` itself, or raise ``ValueError`` if it could be anything but a file in the capture directory."""
    if not isinstance(name, str) or _SAFE_NAME.fullmatch(name) is None:
        raise ValueError(
            f"name = {name!r}: 1 to 200 of the characters A-Z a-z 0-9 . _ - are allowed, "
            "and the first must not be a dot"
        )
    return name


def mask_to_spans(loss_mask: Sequence[int]) -> list[list[int]]:
    """Return the runs of ones in a loss mask as ``[start, end)`` pairs, the way they travel in a request."""
    spans: list[list[int]] = []
    for position, value in enumerate(loss_mask):
        if value and spans and spans[-1][1] == position:
            spans[-1][1] = position + 1
        elif value:
            spans.append([position, position + 1])
    return spans


def spans_to_mask(spans: Sequence[Sequence[int]], length: int) -> torch.Tensor:
    """Invert ``mask_to_spans``: int64 [S] with S = ``length``; raises ``ValueError`` for spans that do not fit."""
    mask = torch.zeros(length, dtype=torch.int64)
    end = 0
    for span in spans:
        start, stop = span
        if not end <= start < stop <= length:
            raise ValueError(f"loss_mask = {spans}: spans [start, end) must be in order and within {length} tokens")
        mask[start:stop] = 1
        end = stop
    return mask
