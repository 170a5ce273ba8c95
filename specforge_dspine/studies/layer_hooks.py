"""Hooks that record the states of a draft's layers, or change the inputs of single layers.

They act on the same forward that training and decoding use, so a study that changes nothing computes exactly what
the draft computes. Layers count from 0 here, as in ``draft.layers``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from specforge_dspine.modeling.draft_model import DSpineDraftModel


@contextlib.contextmanager
def recorded_states(draft: DSpineDraftModel) -> Iterator[list[Tensor]]:
    """A list that gets h_1 .. h_L [R, N·B, H] of every forward inside the context.

    h_ℓ is what the next layer receives: layer ℓ's output after its injection, if the draft has one. h_L is what
    ``norm`` receives.
    """
    states: list[Tensor] = []

    def record(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append(kwargs["hidden_states"] if kwargs else args[0])

    with contextlib.ExitStack() as stack:
        for reader in (*list(draft.layers)[1:], draft.norm):
            stack.enter_context(reader.register_forward_pre_hook(record, with_kwargs=True))
        yield states


@contextlib.contextmanager
def masks_by_layer(draft: DSpineDraftModel, masks: Mapping[int, Tensor]) -> Iterator[None]:
    """Let layer ℓ attend by ``masks[ℓ]`` [R, 1, N·B, keys] (bool) instead of by the forward's own mask."""

    with contextlib.ExitStack() as stack:
        for layer, mask in masks.items():
            hook = partial(replaced_argument, {"attention_mask": mask})
            stack.enter_context(draft.layers[layer].register_forward_pre_hook(hook, with_kwargs=True))
        yield


def replaced_argument(new: dict[str, Any], _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """A module's arguments, with ``new`` keyword arguments."""
    return args, kwargs | new


@contextlib.contextmanager
def codes_by_layer(draft: DSpineDraftModel, predecessors: Mapping[int, Tensor]) -> Iterator[None]:
    """Let the injection after layer ℓ read the codes of the tokens ``predecessors[ℓ]`` [R, N, M] in all slots 1..M.

    In other layers slot 1 reads the anchor's code and every later slot the feature of its neighbor, as usual.
    """

    def replace(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        layer, states, codes, known = args
        if layer in predecessors:
            codes, known = draft.codes(predecessors[layer], states.dtype), known | True
        return layer, states, codes, known

    assert draft.injection is not None
    with draft.injection.register_forward_pre_hook(replace):
        yield
