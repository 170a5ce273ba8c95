"""Looking into a draft's layers during its own forward, and changing what single layers receive.

All of it goes by hooks on the forward that training and decoding use: nothing of that is written a second time, and a
study that changes nothing computes exactly what the draft computes. Layers count from 0 here, as in ``draft.layers``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from specforge_dspine.modeling.draft_model import DSpineDraftModel


@contextlib.contextmanager
def recorded_states(draft: DSpineDraftModel) -> Iterator[list[Tensor]]:
    """The list gets h_1 .. h_L [R, N·B, H] of every forward inside of the context.

    h_ℓ is what the next layer receives: layer ℓ's output after its injection, where the draft has one. h_L is what
    ``norm`` receives.
    """
    states: list[Tensor] = []

    def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append(kwargs["hidden_states"] if kwargs else args[0])

    readers = [*list(draft.layers)[1:], draft.norm]
    with hooked([module.register_forward_pre_hook(keep, with_kwargs=True) for module in readers]):
        yield states


@contextlib.contextmanager
def masks_by_layer(draft: DSpineDraftModel, masks: Mapping[int, Tensor]) -> Iterator[None]:
    """Layer ℓ attends by ``masks[ℓ]`` [R, 1, N·B, keys] (bool) instead of by the forward's own mask."""

    def atomic_write(mask: Tensor) -> Any:
        def replace(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            return args, kwargs | {"attention_mask": mask}

        return replace

    handles = [
        draft.layers[layer].register_forward_pre_hook(atomic_write(mask), with_kwargs=True)
        for layer, mask in masks.items()
    ]
    with hooked(handles):
        yield


@contextlib.contextmanager
def codes_by_layer(draft: DSpineDraftModel, predecessors: Mapping[int, Tensor]) -> Iterator[None]:
    """The injection after layer ℓ reads the codes of the tokens ``predecessors[ℓ]`` [R, N, M] in all slots 1..M; in
    other layers slot 1 reads the anchor's and every later slot the feature of its neighbor, as ever."""

    def replace(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        layer, states, codes, known = args
        if layer in predecessors:
            codes, known = draft.codes(predecessors[layer], states.dtype), known | True
        return layer, states, codes, known

    assert draft.injection is not None
    with hooked([draft.injection.register_forward_pre_hook(replace)]):
        yield


@contextlib.contextmanager
def hooked(handles: list[RemovableHandle]) -> Iterator[None]:
    """Remove the hooks in the end."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
