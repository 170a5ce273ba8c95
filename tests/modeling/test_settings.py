"""The ``dspine:`` section: what it refuses, and what follows from one key alone."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specforge_dspine.modeling.settings import DSpineOptions, DSpineSettings

SIZES: dict[str, Any] = {"transfer_rank": 4, "message_size": 2, "replacement_layers": 1}
SHAPE: dict[str, Any] = SIZES | {"num_hidden_layers": 2, "block_size": 4, "target_layer_ids": [0, 1]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"injection": False, "refinement": True}, "with injection off it must be off too"),
        ({"injection": False, "curriculum": True}, "curriculum: correct predecessors travel by the injection"),
        ({"causal": False, "curriculum": True}, "it must be off without injection, and without causal"),
        ({"replacement_end_ratio": 0.1}, "replacement_end_ratio=0.1 is before replacement_hold_ratio=0.16"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DSpineSettings(**SIZES, **options)


def test_the_curriculum_reaches_one_layer_at_least_and_no_more_than_there_are() -> None:
    assert DSpineOptions(**SHAPE | {"replacement_layers": 2}).replacement_layers == 2, (
        "equal to L: a warning elsewhere"
    )
    with pytest.raises(
        ValidationError, match="replacement_layers=9: at most num_hidden_layers=2, the draft's layers"
    ):
        DSpineOptions(**SHAPE | {"replacement_layers": 9, "curriculum": False})
    for name in ("replacement_layers", "replacement_probability"):
        with pytest.raises(ValidationError, match=rf"{name}=0.* replaces no predecessor; .*set curriculum: off"):
            DSpineOptions(**SHAPE | {name: 0})
        assert not DSpineOptions(**SHAPE | {name: 0, "curriculum": False}).curriculum
    with pytest.raises(ValidationError, match="replacement_end_ratio=0"):
        DSpineOptions(**SHAPE, replacement_hold_ratio=0, replacement_end_ratio=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, 0) for key in ("transfer_rank", "message_size", "top_k", "num_hidden_layers", "intermediate_size")),
        *(("block_size", value) for value in (-3, 0, 1)),
        *((key, -0.1) for key in ("ce_weight", "alignment_weight", "candidate_mass_threshold")),
        *((key, -1) for key in ("replacement_layers", "alignment_warmup_steps", "replacement_probability")),
        ("valid_vocab_size", 0),
        ("target_layer_ids", []),
        ("alignment_weight", float("inf")),
    ],
)
def test_values_out_of_range_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        DSpineOptions(**SHAPE | {key: value})
    assert [problem["loc"][0] for problem in caught.value.errors()] == [key]


def test_what_needs_the_injection_goes_with_it() -> None:
    off = DSpineSettings(**SIZES, injection=False)
    assert not off.refinement and not off.curriculum and off.has_readouts
    assert not DSpineSettings(**SIZES, injection=False, alignment=False).has_readouts, "YAML reads off as False"
    assert DSpineSettings(**SIZES, causal=False).refinement
