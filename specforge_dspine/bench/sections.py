"""The benchmark's sections: each measures one thing and returns rows of the table with every raw number.

Ratios compare steps of one run, taken in turns: the median over rounds of each round's own ratio, with its quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from specforge_dspine.bench.decode_timing import NEW, PIECES, DecodingBench, RoundPieces
from specforge_dspine.bench.dispatch_modes import OperationTimes
from specforge_dspine.bench.models import HEADS, MARKOV_RANK, PLAIN, SIZES, Bench
from specforge_dspine.bench.step_timing import (
    Pieces,
    draft_output,
    kind_of_operation,
    leaves_of,
    objective_pass,
    objective_peak,
    step_in_pieces,
)
from specforge_dspine.conformance.checks import conformance

VECTORS = Path(__file__).parents[2] / "tests" / "golden"  # of a checkout
CHUNKS = 64
STEPS_SHARE = 0.6  # of the budget, by whose end the last round of the steps has to be over
GOALS = {"DSpine ÷ DFlash": 1.25, f"DSpine ÷ {PLAIN}": 1.10, "objective's peak, 64 chunks ÷ none": 1 / 8}
ATTENTION_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1}  # of the two kernels, relative to the largest


@dataclass(frozen=True)
class Row:
    """One line of the table; ``note`` says what else belongs to the number."""

    quantity: str
    value: float
    unit: str = ""
    note: str = ""


@dataclass
class Section:
    """What one section found: rows of the table, and every raw number."""

    rows: list[Row] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    failed: bool = False

    def add(self, quantity: str, value: float, unit: str = "", note: str = "") -> None:
        """One more row; a quantity with a goal gets met or missed into its note."""
        if quantity in GOALS:
            verdict = "met" if value <= GOALS[quantity] else "MISSED"
            note = f"{note}; goal ≤ {GOALS[quantity]:.3g}: {verdict}"
        self.rows.append(Row(quantity, value, unit, note))


@dataclass(frozen=True)
class Plan:
    """What a run measures, how often, and for how long: ``budget_s`` from ``started`` (``time.monotonic``) on."""

    bench: Bench
    warmup: int
    rounds: int
    started: float
    budget_s: float

    def left(self, share: float = 1.0) -> float:
        """Seconds until ``share`` of the budget is used up."""
        return self.started + share * self.budget_s - time.monotonic()

    def turns(self, longest: Callable[[], float], share: float = 1.0) -> Iterator[int]:
        """Rounds, at least one, as long as another one of ``longest`` seconds fits that ``share`` of the budget."""
        for turn in range(self.rounds):
            if turn and longest() > self.left(share):
                return
            yield turn


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def shapes_section(plan: Plan) -> Section:
    """Parameter counts and the forward's shapes at Qwen3-8B's sizes, on the meta device."""
    section, sizes = Section(), SIZES["qwen3_8b"]
    bench = Bench(sizes, torch.device("meta"), "sdpa")
    draft = bench.model.draft_model
    total = sum(parameter.numel() for parameter in draft.parameters())
    section.add("draft parameters", total, note="Qwen3-8B's sizes")
    section.add("injection parameters", draft.num_injection_parameters(), note="of these")
    section.add("code table", draft.transfer_codes.numel() * 4 / 2**30, "GiB", "float32, fixed")
    out = draft_output(bench.model, bench.inputs())
    assert out.features is not None
    section.raw = {name: list(value.shape) for name, value in out._asdict().items() if value is not None}
    return section


def conformance_section(plan: Plan) -> Section:
    """The conformance check of every vector file, on the device, in float32 and bfloat16."""
    section = Section()
    files = sorted(VECTORS.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{VECTORS} holds no vector files; run from a checkout")
    for file in files:
        for dtype in (torch.float32, torch.bfloat16):
            checks = conformance(file, dtype, plan.bench.device)
            off = [check.name for check in checks if not check.ok]
            worst = max(checks, key=lambda check: check.error / max(check.tolerance, 1e-12))
            name = f"{file.stem} in {str(dtype).removeprefix('torch.')}"
            section.raw[name] = {"errors": {check.name: check.error for check in checks}, "off": off}
            note = f"of {len(checks)} agree; nearest to its tolerance: {worst.name}"
            section.add(name, len(checks) - len(off), note=note + (f"; OFF: {', '.join(off)}" if off else ""))
            section.failed |= bool(off)
    return section


def transfer_section(plan: Plan) -> Section:
    """Building the transfer space of the head, once for a run."""
    section = Section()
    seconds = plan.bench.timed(plan.bench.build_transfer_space)
    section.add("transfer space", seconds, "s", "once; kept in a cache afterwards")
    return section


def steps_section(plan: Plan) -> Section:
    """The steps in turns, each round starting with another one."""
    section, bench = Section(), plan.bench
    strategies = {"DSpine": bench.strategy()}
    try:
        strategies |= bench.host_strategies()
    except ImportError as error:
        section.raw["ratios"] = f"not measured: specforge does not import ({error})"
    names = list(strategies)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(plan.warmup):
        for name in names:
            bench.step_seconds(strategies[name])
    for turn in plan.turns(lambda: sum(max(each) for each in seconds.values()), STEPS_SHARE):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken = bench.step_seconds(strategies[name])
            seconds[name].append(taken[0])
            processor[name].append(taken[1])
    for strategy in strategies.values():
        strategy.trainable_module().zero_grad(set_to_none=True)
    section.raw |= {"seconds": seconds, "processor_seconds": processor}
    notes = {
        "DFlash": "SpecForge's: CE only",
        PLAIN: "SpecForge's: CE and ℓ1 to the teacher; its classes' default, no Markov and no confidence head",
        HEADS: f"the same with a vanilla Markov head of rank {MARKOV_RANK} and the confidence head",
    }
    for name in names:
        low, middle, high = spread(seconds[name])
        note = f"quartiles {low:.3f}–{high:.3f}, {len(seconds[name])} rounds"
        section.add(f"{name} step", middle, "s", f"{note}; {notes[name]}" if name in notes else note)
    for name in names[1:]:
        low, middle, high = spread(ratios(seconds, name))
        note = f"quartiles {low:.3f}–{high:.3f}"
        if bench.device.type == "cpu":  # less disturbed by whatever else the machine does
            note += f"; by processor time {spread(ratios(processor, name))[1]:.3f}"
        section.add(f"DSpine ÷ {name}", middle, note=note)
    return section


def ratios(seconds: dict[str, list[float]], other: str) -> list[float]:
    """Each round's own ratio of DSpine's step to the ``other`` one."""
    return [ours / theirs for ours, theirs in zip(seconds["DSpine"], seconds[other], strict=True)]


def time_section(plan: Plan) -> Section:
    """Where a DSpine step's time goes: its pieces, and the objective's by kind of operation."""
    section, bench = Section(), plan.bench
    inputs = bench.inputs()
    step_in_pieces(bench, inputs)
    taken: list[Pieces] = []
    for _ in plan.turns(lambda: 3 * (taken[-1].objective_forward + taken[-1].objective_backward)):
        taken.append(step_in_pieces(bench, inputs))
    names = ("draft_forward", "objective_forward", "objective_backward", "draft_backward")
    more = ("injection", "look_ahead")
    medians = {name: statistics.median(getattr(each, name) for each in taken) for name in (*names, *more)}
    whole = sum(medians[name] for name in names)
    for name in names:
        section.add(name.replace("_", " "), medians[name], "s", f"{medians[name] / whole:.0%} of the step")
    note = f"{medians['injection'] / whole:.0%} of the step, in the draft's forward"
    section.add("injection, forward", medians["injection"], "s", note)
    note = f"{medians['look_ahead'] / whole:.0%} of a step; only where a step has several micro-batches"
    section.add("look ahead", medians["look_ahead"], "s", note)
    section.add("supervised rows", taken[0].rows, note=f"of {bench.sizes.row_limit}; no logits for the others")

    leaves = leaves_of(draft_output(bench.model, inputs))
    clock = OperationTimes(kind_of_operation(bench.sizes), bench.wait)
    with clock:
        objective_pass(bench.model, inputs, leaves)
    busy = sum(clock.seconds.values())
    for kind, seconds in sorted(clock.seconds.items(), key=lambda item: -item[1]):
        section.add(f"objective: {kind}", seconds, "s", f"{seconds / busy:.0%} of its operations, both ways")
    section.raw = {"pieces": [asdict(each) for each in taken], "objective": dict(clock.seconds)}
    return section


def memory_section(plan: Plan) -> Section:
    """Peak memory of the objective, forward and backward, in 64 chunks and in one."""
    section, bench = Section(), plan.bench
    blocks = max(1, -(-bench.model.num_anchors // CHUNKS))
    anchors, chunk_blocks = bench.model.num_anchors, bench.model.objective_chunk_blocks
    bench.model.num_anchors = blocks * CHUNKS
    peaks = {}
    try:
        inputs = bench.inputs()
        leaves = leaves_of(draft_output(bench.model, inputs))
        for name, chunk in ((f"{CHUNKS} chunks", blocks), ("no chunks", 0)):
            bench.model.objective_chunk_blocks = chunk
            peaks[name] = objective_peak(bench, inputs, leaves)
            rows = chunk * (bench.sizes.block - 1) or "all"
            section.add(f"objective's peak, {name}", peaks[name] / 2**20, "MiB", f"{rows} rows at a time")
            section.raw[f"bytes, {name}"] = peaks[name]
    except torch.OutOfMemoryError:
        section.raw["without chunks"] = "not measured: out of memory"
        return section
    finally:
        bench.model.num_anchors, bench.model.objective_chunk_blocks = anchors, chunk_blocks
        bench.model.zero_grad(set_to_none=True)
    how = "allocator's peak" if bench.device.type == "cuda" else "live tensors"
    chunked, whole = peaks.values()
    section.add("objective's peak, 64 chunks ÷ none", chunked / whole, note=f"{how}, above what existed before")
    return section


def attention_section(plan: Plan) -> Section:
    """FlexAttention and its block mask against dense attention, through the whole draft."""
    section, bench = Section(), plan.bench
    cuda = bench.device.type == "cuda"
    inputs = bench.inputs()
    outputs = {}
    # On a CPU FlexAttention runs forward only, and compiling it there would take longer than everything else.
    with torch.set_grad_enabled(cuda), torch.compiler.set_stance("default" if cuda else "force_eager"):
        for backend in ("flex_attention", "sdpa"):
            with attention_backend(bench, backend):
                outputs[backend] = draft_output(bench.model, inputs).hidden.detach().float()
    flex, dense = outputs.values()
    error = float((flex - dense).abs().max() / dense.abs().max())
    allowed = ATTENTION_TOLERANCE[bench.sizes.dtype]
    section.failed = not error <= allowed
    note = f"of the final states, relative to the largest; allowed {allowed:.0e}"
    section.add("flex_attention against sdpa", error, note=f"{'OFF: ' if section.failed else ''}{note}")
    return section


def decoding_section(plan: Plan) -> Section:
    """A sampled round by its pieces, and the cache against refining step by step; all in the same rounds."""
    section, bench = Section(), plan.bench
    training = bench.model.draft_model.training
    taken: list[RoundPieces] = []
    try:
        with attention_backend(bench, "sdpa"):  # one block against a long context: no block mask to build
            rounds = DecodingBench(bench)
            for _ in range(plan.warmup):
                rounds.round_in_pieces()
            for _ in plan.turns(lambda: taken[-1].whole + taken[-1].stepwise):
                taken.append(rounds.round_in_pieces())
    finally:
        bench.model.draft_model.train(training)
    whole = statistics.median(each.whole for each in taken)
    note = f"sampled, the target's forward included; context {bench.sizes.sequence}, {NEW} tokens of it new"
    section.add("round", whole, "s", note)
    for name in PIECES:
        seconds = statistics.median(getattr(each, name) for each in taken)
        section.add(name, seconds, "s", f"{seconds / whole:.0%} of the round")
    compared = {
        "step by step ÷ cache and walk": [each.stepwise / (each.cache + each.walk) for each in taken],
        "drafting ÷ target and verify": [each.drafting / (each.target + each.verify) for each in taken],
        "refinement (cache and walk) ÷ backbone": [(each.cache + each.walk) / each.backbone for each in taken],
    }
    for name, values in compared.items():
        low, middle, high = spread(values)
        section.add(name, middle, note=f"quartiles {low:.3f}–{high:.3f}, {len(taken)} rounds")
    section.raw = {"pieces": [asdict(each) for each in taken]}
    return section


@contextmanager
def attention_backend(bench: Bench, backend: str) -> Iterator[None]:
    """DSpine's draft with another attention."""
    config, before = bench.model.draft_model.config, bench.model.attention_backend
    bench.model.attention_backend = config._attn_implementation = backend
    try:
        yield
    finally:
        bench.model.attention_backend = config._attn_implementation = before


# Gradients stay on throughout, so that FlexAttention is compiled once.
SECTIONS: dict[str, Callable[[Plan], Section]] = {
    "shapes": shapes_section,
    "conformance": conformance_section,
    "transfer space": transfer_section,
    "steps": steps_section,
    "time": time_section,
    "memory": memory_section,
    "attention": attention_section,
    "decoding": decoding_section,
}
CARD_SECTIONS = frozenset({"conformance", "attention"})  # on a GPU, and in dry runs
