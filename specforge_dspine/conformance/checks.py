"""Every quantity of a golden file against this package's own computation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specforge_dspine.conformance.vectors import VectorFileError, Vectors
from specforge_dspine.decoding.candidates import candidates, excluded_mask
from specforge_dspine.decoding.proposal import propose, propose_by_walk
from specforge_dspine.decoding.sampling import GREEDY
from specforge_dspine.decoding.transition_cache import path_probabilities, transition_cache
from specforge_dspine.modeling.draft_model import DraftOutput
from specforge_dspine.modeling.transfer_space import build_transfer_space
from specforge_dspine.objective.alignment_gate import alignment_beta, cosine_terms
from specforge_dspine.objective.curriculum import replacement_probability
from specforge_dspine.objective.distillation import (
    Distill,
    Supervision,
    distill,
    distill_by_autograd,
    teacher_distribution,
)
from specforge_dspine.objective.refinement import refinement_terms
from specforge_dspine.objective.supervision import SupervisedPositions, gather_positions, supervised_positions

# Qwen3's RoPE and norms compute in float32 whatever the model's dtype is, hence 1e-6 and not 1e-12 in float64.
# float32 gets a few times the 1e-5 that one run of it is off; bfloat16 keeps 8 bits, and discrete picks may flip.
TOLERANCE = {torch.float64: 5e-6, torch.float32: 5e-5, torch.bfloat16: 1.5e-1}
FLIPPED = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 0.35}  # share of discrete values that may differ
# ℓ1's gradient is sign(q − p): where q ≈ p, eight bits flip it. In bfloat16 a gradient is judged as a whole, by
# ‖a − b‖ / min(‖a‖, ‖b‖): 0.1 to 0.8 here, √2 for one of another direction, 2 for the wrong sign or three times
# the size, infinite for none at all.
GRADIENT_NORM = 1.0
PATH_TEMPERATURE = 0.7


class Check(NamedTuple):
    """One quantity: its relative error (for discrete ones: the share that differs) and what is allowed."""

    name: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Within tolerance; False for NaN."""
        return self.error <= self.tolerance  # False for NaN


def relative(ours: Tensor, theirs: Tensor) -> float:
    """max|a − b| / max|b|; discrete tensors: the share of entries that differ; wrong shape: infinite."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not theirs.is_floating_point():
        return float((ours.to(theirs.dtype) != theirs).double().mean())
    difference = (ours.detach().double() - theirs.double()).abs().max()
    return float(difference / theirs.double().abs().max().clamp_min(1e-12))


def relative_norm(ours: Tensor, theirs: Tensor) -> float:
    """‖a − b‖ / min(‖a‖, ‖b‖); wrong shape: infinite."""
    if ours.shape != theirs.shape:
        return float("inf")
    a, b = ours.double(), theirs.double()
    return float((a - b).norm() / torch.minimum(a.norm(), b.norm()).clamp_min(1e-12))


def candidate_error(logits: Tensor, ours: Tensor, theirs: Tensor) -> Tensor:
    """How far two top-K sets [.., K] are apart: the largest gap between the logits of their i-th best, relative to
    the largest of ``logits`` [.., V] (−∞: excluded); infinite if ``theirs`` has another shape, an impossible id,
    or the same id twice.
    """
    if ours.shape != theirs.shape or not 0 <= int(theirs.min()) <= int(theirs.max()) < logits.shape[-1]:
        return _scalar(float("inf"))
    ordered = theirs.sort(dim=-1).values
    if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        return _scalar(float("inf"))
    best, found = (logits.gather(-1, ids).sort(dim=-1).values for ids in (ours, theirs))
    return (best - found).abs().max() / logits[logits.isfinite()].abs().max()


def transfer_checks(v: Vectors) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The transfer space of the file's head, streamed in chunks of few rows (§3)."""
    space = build_transfer_space(
        v.head, v.draft.settings.transfer_rank, dtype=torch.promote_types(v.dtype, torch.float32), chunk_rows=17
    )
    for field, value in space._asdict().items():
        yield f"transfer/{field}", value, v[f"transfer/{field}"]
    yield "transfer/codes_gram", space.codes @ space.codes.T, v["transfer/codes_gram"]


def schedule_checks(v: Vectors) -> Iterator[tuple[str, Tensor, Tensor]]:
    """β and the curriculum's probability at the file's step (§5)."""
    s = v.scalars
    beta = alignment_beta(s["step"], s["warmup_steps"], v.draft.settings)
    chance = replacement_probability(s["step"], s["total_steps"], v.draft.settings)
    yield "schedule/beta", _scalar(beta), _scalar(s["beta"])
    yield "schedule/replacement_probability", _scalar(chance), _scalar(s["replacement_probability"])


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def forward(v: Vectors, *, replace: bool) -> DraftOutput:
    """The draft's outputs of the padded batch, [2, N + 1, B, ..]."""
    return v.model.forward_blocks(
        v.batch("input_ids"), v.batch("taps"), v.blocks(replace=replace), with_features=True
    )


def output_checks(v: Vectors) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Hidden states, pre-injection states and features of the file's blocks (§2–4)."""
    count = len(v.anchors)
    for replace, suffix in ((True, ""), (False, "_no_replacement")):
        out = forward(v, replace=replace)
        assert out.features is not None
        yield f"outputs/hidden{suffix}", out.hidden[0, :count], v[f"outputs/hidden{suffix}"]
        yield f"outputs/pre_injection{suffix}", out.pre_injection[0, :count], v[f"outputs/pre_injection{suffix}"]
        yield f"outputs/features{suffix}", out.features[:, 0, :count], v[f"outputs/features{suffix}"]


def rows_of(v: Vectors) -> SupervisedPositions:
    """The supervised rows of the padded batch."""
    return supervised_positions(
        v.batch("input_ids"),
        v.loss_mask(),
        v.blocks(replace=True),
        int(v.draft.block_size),
        v.model.loss_decay_gamma,
    )


def distillations() -> dict[str, Distill]:
    """As training computes it, and its reference, by the suffix of their quantities."""
    return {"": distill, " (by autograd)": distill_by_autograd}


def row_checks(v: Vectors) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Row terms with the file's candidates, and our own candidates by logit margin."""
    rows = rows_of(v)
    for name, ours in (("block", rows.block), ("t", rows.slot), ("label", rows.label), ("weight", rows.weight)):
        yield f"rows/{name}", ours, v[f"rows/{name}"]
    if len(rows.label) != len(v["rows/label"]):
        return  # the rows above are off; nothing below can be compared
    last, settings = v.batch("last"), v.draft.settings
    batch = gather_positions(v.draft, v.head, forward(v, replace=True), last, rows)
    p = teacher_distribution(v.head, batch.teacher, batch.teacher_index)
    chosen = v.candidates("rows/candidates")
    for name, implementation in distillations().items():
        given = Supervision(rows.label, rows.weight, p.clone(), chosen)
        d = implementation(batch.hidden, v.head, given, settings)
        for field in ("ce", "l1", "correct"):
            yield f"rows/{field}{name}", getattr(d, field), v[f"rows/{field}"]
    assert d.candidates is not None
    yield "rows/mass", d.candidates.mass, v["rows/mass"]
    refined = refinement_terms(v.draft, v.head, batch.pre_injection, rows.label, rows.predecessor, d.candidates)
    names = {"ce": "rce", "l1": "rl1", "correct": "refined_correct"}
    for field, value in refined._asdict().items():
        name = f"rows/{names.get(field, field)}"
        yield name, value, v[name]
    yield "rows/align", cosine_terms(v.draft, batch.features, rows.label), v["rows/align"]
    logits = F.linear(batch.hidden, v.head).double()
    own = logits.topk(settings.top_k, dim=-1).indices
    yield "rows/candidates", 1 + candidate_error(logits, own, v["rows/candidates"]), _scalar(1.0)


def decode_checks(v: Vectors) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Block 0: candidates by margin, then scores, picks and distributions in the file's order of candidates."""
    out = forward(v, replace=False)
    anchor = v["inputs/input_ids"][v.anchors[0]]
    excluded = excluded_mask(v.draft.settings, v.draft.mask_token_id, len(v.head), v.head.device)
    hidden, pre = out.hidden[0, 0, 1:], out.pre_injection[0, 0, 1:]
    own, _ = candidates(v.head, hidden, excluded, v.draft.settings.top_k)
    theirs = v.candidates("decode/candidates")
    logits = F.linear(hidden, v.head).double().masked_fill(excluded, -torch.inf)
    yield "decode/candidates", 1 + candidate_error(logits, own, v["decode/candidates"]), _scalar(1.0)
    scores = transition_cache(v.draft, v.head, pre, theirs, anchor)
    yield "decode/scores", scores, v["decode/scores"]
    yield "decode/greedy", propose_by_walk(scores, theirs, GREEDY).tokens, v["decode/greedy"]
    states = (out.hidden[0, 0], out.pre_injection[0, 0])
    drafted = propose(v.draft, v.head, *states, anchor, GREEDY, refine=True)
    yield "decode/greedy, with our candidates", drafted.tokens, v["decode/greedy"]
    name = f"decode/path_probs_t{PATH_TEMPERATURE}"
    path = v["decode/path"].clamp(0, scores.shape[-1] - 1)
    yield name, path_probabilities(scores, path, PATH_TEMPERATURE), v[name]


def loss_checks(v: Vectors) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The chunked objective and the gradient of numerator / denominator by every weight.

    In bfloat16 near ties change the top K, and with it the loss by a jump: there the file's candidates are used.
    """
    chosen = v.candidates("rows/candidates") if v.dtype is torch.bfloat16 else None
    for normalization, (suffix, implementation) in product(("separate", "shared"), distillations().items()):
        v.model.normalization, v.model.distill = normalization, implementation
        v.draft.zero_grad()
        loss = v.model(
            v.batch("input_ids"),
            v.loss_mask(),
            v.batch("taps"),
            v.batch("last"),
            v.blocks(replace=True),
            beta=v.scalars["beta"],
            candidates=chosen,
        )
        total = loss.numerator / loss.denominator
        total.backward()
        for name, value in (("loss", total), ("numerator", loss.numerator), ("denominator", loss.denominator)):
            yield f"{name}_{normalization}{suffix}", value.double(), _scalar(v.scalars[f"{name}_{normalization}"])
        for name, parameter in v.draft.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            yield f"grads_{normalization}/{name}{suffix}", grad, v[f"grads_{normalization}/{name}"]


PARTS = (transfer_checks, schedule_checks, output_checks, row_checks, decode_checks, loss_checks)


def conformance(path: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> list[Check]:
    """Every check of the vector file at ``path`` in ``dtype``, computed on ``device``.

    Raises:
        FileNotFoundError: the file, or the JSON of scalars beside it, is missing.
        VectorFileError: the file lacks a quantity, or an input cannot be used, by name.
        CheckpointError: the file's draft is no complete draft, by name.
    """
    results = []
    try:
        vectors = Vectors(path, dtype, device)
        for part in PARTS:
            for name, *both in part(vectors):
                ours, theirs = (value.cpu() for value in both)
                if dtype is torch.bfloat16 and name.startswith("grads_"):
                    results.append(Check(name, relative_norm(ours, theirs), GRADIENT_NORM))
                    continue
                allowed = TOLERANCE if theirs.is_floating_point() else FLIPPED
                results.append(Check(name, relative(ours, theirs), allowed[dtype]))
    except KeyError as error:
        raise VectorFileError(f"{path}: {error.args[0]} is missing from it or from the JSON beside it") from error
    return results
