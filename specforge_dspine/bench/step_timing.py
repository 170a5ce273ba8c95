"""DSpine's step taken apart: draft forward, objective forward, objective backward, draft backward.

The objective runs alone where the draft's output is given instead of computed. Then its memory can be measured, and
its time be told apart by kind of operation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from specforge_dspine.bench.dispatch_modes import Allocations, Shape
from specforge_dspine.bench.models import Bench, Sizes
from specforge_dspine.modeling.blocks import Blocks
from specforge_dspine.modeling.draft_model import DraftOutput
from specforge_dspine.modeling.injection import AdjacentCausalInjection
from specforge_dspine.objective.loss import LossTerms
from specforge_dspine.objective.training_model import DSpineTrainingModel


def draft_output(model: DSpineTrainingModel, inputs: dict[str, Any]) -> DraftOutput:
    """The draft's forward, as training runs it."""
    blocks: Blocks = inputs["blocks"]
    return model.forward_blocks(inputs["input_ids"], inputs["hidden_states"], blocks, with_features=True)


def leaves_of(output: DraftOutput) -> DraftOutput:
    """The same values without history, to take gradients by."""
    return DraftOutput(*(None if value is None else value.detach().requires_grad_() for value in output))  # type: ignore[arg-type]


@contextmanager
def given_output(model: DSpineTrainingModel, output: DraftOutput) -> Iterator[None]:
    """The model's forward is its objective alone: the draft's ``output`` is given, not computed."""
    vars(model)["forward_blocks"] = lambda *_args, **_options: output
    try:
        yield
    finally:
        del vars(model)["forward_blocks"]


@dataclass
class Pieces:
    """Seconds of the pieces of one DSpine step, and the supervised ``rows`` of it."""

    injection: float = 0.0
    draft_forward: float = 0.0  # the injection included
    objective_forward: float = 0.0
    objective_backward: float = 0.0  # what is recomputed in it included
    draft_backward: float = 0.0
    look_ahead: float = 0.0  # of windows with several micro-batches, beside the step
    rows: int = 0


def step_in_pieces(bench: Bench, inputs: dict[str, Any]) -> Pieces:
    """One DSpine step, each piece timed on its own."""
    model, pieces, kept = bench.model, Pieces(), []
    started: list[float] = []
    model.zero_grad(set_to_none=True)

    def enter(*_: Any) -> None:
        bench.wait()
        started.append(time.perf_counter())

    def leave(*_: Any) -> None:
        bench.wait()
        pieces.injection += time.perf_counter() - started.pop()

    injection = cast(AdjacentCausalInjection, model.draft_model.injection)
    hooks = [injection.register_forward_pre_hook(enter), injection.register_forward_hook(leave)]
    try:
        pieces.draft_forward = bench.timed(lambda: kept.append(draft_output(model, inputs)))
    finally:
        for hook in hooks:
            hook.remove()
    output = kept.pop()
    leaves = leaves_of(output)
    losses: list[LossTerms] = []
    with given_output(model, leaves):
        pieces.objective_forward = bench.timed(lambda: losses.append(model(**inputs)))
        pieces.objective_backward = bench.timed(losses[0].numerator.backward)
    pairs = [(value, leaf.grad) for value, leaf in zip(output, leaves, strict=True) if leaf is not None]
    roots, gradients = zip(*((value, gradient) for value, gradient in pairs if gradient is not None), strict=True)
    pieces.draft_backward = bench.timed(lambda: torch.autograd.backward(roots, gradients))
    with torch.no_grad():
        pieces.look_ahead = bench.timed(lambda: model(**inputs | {"window_reduce": None}))
    pieces.rows = int(losses[0].parts["rows"][0])
    return pieces


PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.linear"})


def kind_of_operation(sizes: Sizes) -> Callable[[str, list[Shape]], str]:
    """Which part of the objective an operation belongs to, by the letters in the shapes of its tensors."""
    vocab, k, small = sizes.vocab, sizes.top_k, {sizes.rank, sizes.message}

    def kind(operation: str, shapes: list[Shape]) -> str:
        if operation == "aten.topk":
            return "candidates (top K of V)"
        if any(len(shape) in (2, 3) and k in shape[-2:] for shape in shapes):
            return "refinement"
        if any(vocab in shape for shape in shapes):
            return "vocabulary products" if operation in PRODUCTS else "vocabulary softmaxes and sums"
        if any(len(shape) == 3 and shape[-1] == sizes.rank for shape in shapes):
            return "alignment"
        if any(len(shape) == 2 and small & set(shape) for shape in shapes):
            return "refinement"
        return "rows, norms, sums"

    return kind


def objective_pass(model: DSpineTrainingModel, inputs: dict[str, Any], leaves: DraftOutput) -> Tensor:
    """The objective and its gradients, the draft's output given. Returns the numerator."""
    with given_output(model, leaves):
        numerator: Tensor = model(**inputs).numerator
        numerator.backward()  # type: ignore[no-untyped-call]
    return numerator.detach()


def objective_peak(bench: Bench, inputs: dict[str, Any], leaves: DraftOutput) -> int:
    """Bytes that one objective, forward and backward, needs at most, beyond what exists before."""
    bench.model.zero_grad(set_to_none=True)
    leaves = leaves_of(leaves)
    if bench.device.type != "cuda":
        with Allocations() as allocations:
            objective_pass(bench.model, inputs, leaves)
        return allocations.peak
    bench.wait()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(bench.device)
    before = torch.cuda.memory_allocated(bench.device)
    objective_pass(bench.model, inputs, leaves)
    bench.wait()
    return torch.cuda.max_memory_allocated(bench.device) - before
