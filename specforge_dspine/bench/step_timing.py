"""Sections about training steps: against SpecForge's own, in pieces, and the objective's peak memory.

The objective runs alone when the draft's output is given instead of computed. Then its memory can be measured, and
its time be attributed to kinds of operations.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from specforge_dspine.bench.dispatch_modes import Allocations, OperationTimes, Shape
from specforge_dspine.bench.models import HEADS, MARKOV_RANK, PLAIN, Bench, Sizes
from specforge_dspine.bench.section import Plan, Section, medians, quartiles
from specforge_dspine.modeling.draft_model import DraftOutput
from specforge_dspine.modeling.injection import AdjacentCausalInjection
from specforge_dspine.objective.training_model import DSpineTrainingModel

CHUNKS = 64
STEPS_SHARE = 0.6  # of the budget, by whose end the last round of the steps has to be over
PIECES = ("draft_forward", "objective_forward", "objective_backward", "draft_backward")
PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.linear"})


def transfer_section(plan: Plan) -> Section:
    """Building the transfer space of the head, once for a run."""
    section = Section()
    seconds, _ = plan.bench.timed(plan.bench.build_transfer_space)
    section.add("transfer space", seconds, "s", "once; kept in a cache afterwards")
    return section


def steps_section(plan: Plan) -> Section:
    """The steps of DSpine, DFlash and DSpark in turns, each round starting with another one."""
    section, bench = Section(), plan.bench
    strategies = {"DSpine": bench.strategy()}
    try:
        strategies |= bench.host_strategies()
    except ImportError as error:
        section.raw["ratios"] = f"not measured: specforge does not import ({error})"
    names = list(strategies)
    for name in names * plan.warmup:
        bench.step_seconds(strategies[name])
    rounds: list[dict[str, tuple[float, float]]] = []
    for turn in plan.turns(lambda: sum(max(each[name][0] for each in rounds) for name in names), STEPS_SHARE):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        rounds.append({name: bench.step_seconds(strategies[name]) for name in order})
    for strategy in strategies.values():
        strategy.trainable_module().zero_grad(set_to_none=True)
    seconds, processor = ({name: [each[name][k] for each in rounds] for name in names} for k in (0, 1))
    section.raw |= {"seconds": seconds, "processor_seconds": processor}
    notes = {
        "DFlash": "; SpecForge's: CE only",
        PLAIN: "; SpecForge's: CE and ℓ1 to the teacher; its classes' default, no Markov and no confidence head",
        HEADS: f"; the same with a vanilla Markov head of rank {MARKOV_RANK} and the confidence head",
    }
    for name, values in seconds.items():
        note = f"{quartiles(values)}, {len(values)} rounds{notes.get(name, '')}"
        section.add(f"{name} step", statistics.median(values), "s", note)

    def ratios(taken: dict[str, list[float]], other: str) -> list[float]:
        return [ours / theirs for ours, theirs in zip(taken["DSpine"], taken[other], strict=True)]

    for name in names[1:]:
        note = ""
        if bench.device.type == "cpu":  # less disturbed by whatever else the machine does
            note = f"; by processor time {statistics.median(ratios(processor, name)):.3f}"
        section.add_ratios(f"DSpine ÷ {name}", ratios(seconds, name), note)
    return section


def time_section(plan: Plan) -> Section:
    """The time of a DSpine step by pieces, and that of the objective by kind of operation."""
    section, bench = Section(), plan.bench
    inputs = bench.inputs()
    step_in_pieces(bench, inputs)
    rounds: list[dict[str, float]] = []
    for _ in plan.turns(lambda: 3 * (rounds[-1]["objective_forward"] + rounds[-1]["objective_backward"])):
        rounds.append(step_in_pieces(bench, inputs))
    middle = medians(rounds)
    step = sum(middle[name] for name in PIECES)
    for name in PIECES:
        section.add_share(name.replace("_", " "), middle[name], step, "the step")
    section.add_share("injection, forward", middle["injection"], step, "the step, in the draft's forward")
    section.add_share("look ahead", middle["look_ahead"], step, "a step; only where a step has several micro-batches")
    limit = bench.sizes.anchors * (bench.sizes.block - 1)
    section.add("supervised positions", int(rounds[0]["positions"]), note=f"of {limit}; no logits for the others")

    leaves = leaves_of(draft_output(bench.model, inputs))
    clock = OperationTimes(kind_of_operation(bench.sizes), bench.wait)
    with clock:
        objective_pass(bench.model, inputs, leaves)
    busy = sum(clock.seconds.values())
    for kind, seconds in sorted(clock.seconds.items(), key=lambda item: -item[1]):
        section.add_share(f"objective: {kind}", seconds, busy, "its operations, both ways")
    section.raw = {"pieces": rounds, "objective": dict(clock.seconds)}
    return section


def memory_section(plan: Plan) -> Section:
    """Peak memory of the objective, forward and backward, in 64 chunks and in one."""
    section, bench = Section(), plan.bench
    model = bench.model
    blocks = max(1, -(-model.num_anchors // CHUNKS))
    anchors, chunk_blocks = model.num_anchors, model.objective_chunk_blocks
    model.num_anchors = blocks * CHUNKS
    peaks = []
    try:
        inputs = bench.inputs()
        leaves = leaves_of(draft_output(model, inputs))
        for name, chunk in ((f"{CHUNKS} chunks", blocks), ("no chunks", 0)):
            model.objective_chunk_blocks = chunk
            peaks.append(objective_peak(bench, inputs, leaves))
            positions = chunk * (bench.sizes.block - 1) or "all"
            section.add(f"objective's peak, {name}", peaks[-1] / 2**20, "MiB", f"{positions} positions at a time")
            section.raw[f"bytes, {name}"] = peaks[-1]
    except torch.OutOfMemoryError:
        section.raw["without chunks"] = "not measured: out of memory"
        return section
    finally:
        model.num_anchors, model.objective_chunk_blocks = anchors, chunk_blocks
        model.zero_grad(set_to_none=True)
    how = "allocator's peak" if bench.device.type == "cuda" else "live tensors"
    section.add("objective's peak, 64 chunks ÷ none", peaks[0] / peaks[1], note=f"{how}, above what existed before")
    return section


def draft_output(model: DSpineTrainingModel, inputs: dict[str, Any]) -> DraftOutput:
    """The draft's forward, as training runs it."""
    return model.forward_blocks(inputs["input_ids"], inputs["hidden_states"], inputs["blocks"], with_features=True)


def leaves_of(output: DraftOutput) -> DraftOutput:
    """The same values as leaves of a new graph."""
    return DraftOutput(*(None if value is None else value.detach().requires_grad_() for value in output))  # type: ignore[arg-type]


@contextmanager
def replaced_method(module: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of one module while the context lasts."""
    vars(module)[name] = function
    try:
        yield
    finally:
        del vars(module)[name]


def given_output(model: DSpineTrainingModel, output: DraftOutput) -> AbstractContextManager[None]:
    """Let the model's forward be its objective alone, on the draft's ``output``."""
    return replaced_method(model, "forward_blocks", lambda *_args, **_options: output)


def step_in_pieces(bench: Bench, inputs: dict[str, Any]) -> dict[str, float]:
    """Seconds of the pieces of one DSpine step, of the injection and the look ahead; and the supervised positions."""
    model, seconds = bench.model, {"injection": 0.0}
    model.zero_grad(set_to_none=True)
    injection = cast(AdjacentCausalInjection, model.draft_model.injection)
    forward = injection.forward

    def timed_forward(*states: Any) -> Tensor:
        spent, injected = bench.timed(lambda: forward(*states))
        seconds["injection"] += spent
        return injected

    with replaced_method(injection, "forward", timed_forward):
        seconds["draft_forward"], output = bench.timed(lambda: draft_output(model, inputs))
    leaves = leaves_of(output)
    with given_output(model, leaves):
        seconds["objective_forward"], loss = bench.timed(lambda: model(**inputs))
        seconds["objective_backward"], _ = bench.timed(loss.numerator.backward)  # recomputation included
    pairs = [(value, leaf.grad) for value, leaf in zip(output, leaves, strict=True) if leaf is not None]
    roots, gradients = zip(*((value, gradient) for value, gradient in pairs if gradient is not None), strict=True)
    seconds["draft_backward"], _ = bench.timed(lambda: torch.autograd.backward(roots, gradients))
    with torch.no_grad():
        seconds["look_ahead"], _ = bench.timed(lambda: model(**inputs | {"window_reduce": None}))
    return seconds | {"positions": float(loss.parts["rows"][0])}


def kind_of_operation(sizes: Sizes) -> Callable[[str, list[Shape]], str]:
    """Which part of the objective an operation belongs to, by the sizes in the shapes of its tensors."""
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
        return "positions, norms, sums"

    return kind


def objective_pass(model: DSpineTrainingModel, inputs: dict[str, Any], leaves: DraftOutput) -> None:
    """Compute the objective and its gradients, given the draft's output."""
    with given_output(model, leaves):
        model(**inputs).numerator.backward()


def objective_peak(bench: Bench, inputs: dict[str, Any], leaves: DraftOutput) -> int:
    """The most bytes that one objective, forward and backward, needs beyond what existed before."""
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
