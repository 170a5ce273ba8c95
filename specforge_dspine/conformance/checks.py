"""Every quantity of a vector file, computed by the package's own functions and compared with the file's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specforge_dspine.conformance.comparison import Check, candidate_error, check, scalar
from specforge_dspine.conformance.vectors import Vectors
from specforge_dspine.decoding.proposal import candidates, excluded_mask, propose, walk
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
from specforge_dspine.objective.supervision import gather_positions, supervised_positions
from specforge_dspine.utils.errors import InvalidFileError

Quantities = Iterator[tuple[str, Tensor, Tensor]]
"""Name, our value, the file's value."""

PATH_TEMPERATURE = 0.7


def distillations() -> dict[str, Distill]:
    """Training's distillation and its reference implementation, by the suffix of their quantities."""
    return {"": distill, " (by autograd)": distill_by_autograd}


def transfer_quantities(v: Vectors) -> Quantities:
    """The transfer space of the file's head, streamed in chunks of few rows (§3)."""
    dtype = torch.promote_types(v.dtype, torch.float32)
    space = build_transfer_space(v.head, v.draft.settings.transfer_rank, dtype=dtype, chunk_rows=17)
    for field, value in space._asdict().items():
        yield f"transfer/{field}", value, v[f"transfer/{field}"]
    yield "transfer/codes_gram", space.codes @ space.codes.T, v["transfer/codes_gram"]


def schedule_quantities(v: Vectors) -> Quantities:
    """β and the curriculum's probability at the file's step (§5)."""
    s, settings = v.scalars, v.draft.settings
    yield "schedule/beta", scalar(alignment_beta(s["step"], s["warmup_steps"], settings)), scalar(s["beta"])
    probability = scalar(replacement_probability(s["step"], s["total_steps"], settings))
    yield "schedule/replacement_probability", probability, scalar(s["replacement_probability"])


def forward(v: Vectors, *, replace: bool) -> DraftOutput:
    """The draft's outputs of the padded batch, [2, N + 1, B, ..]."""
    return v.model.forward_blocks(
        v.batch("input_ids"), v.batch("taps"), v.blocks(replace=replace), with_features=True
    )


def output_quantities(v: Vectors) -> Quantities:
    """Hidden states, pre-injection states and features of the file's blocks (§2–4)."""
    count = len(v.anchors)
    for replace, suffix in ((True, ""), (False, "_no_replacement")):
        out = forward(v, replace=replace)
        assert out.features is not None
        yield f"outputs/hidden{suffix}", out.hidden[0, :count], v[f"outputs/hidden{suffix}"]
        yield f"outputs/pre_injection{suffix}", out.pre_injection[0, :count], v[f"outputs/pre_injection{suffix}"]
        yield f"outputs/features{suffix}", out.features[:, 0, :count], v[f"outputs/features{suffix}"]


def position_quantities(v: Vectors) -> Quantities:
    """Terms of every supervised position with the file's candidates, and our own candidates by logits (§5)."""
    ids, blocks, settings = v.batch("input_ids"), v.blocks(replace=True), v.draft.settings
    rows = supervised_positions(ids, v.loss_mask(), blocks, int(v.draft.block_size), v.model.loss_decay_gamma)
    for name, ours in (("block", rows.block), ("t", rows.slot), ("label", rows.label), ("weight", rows.weight)):
        yield f"rows/{name}", ours, v[f"rows/{name}"]
    if len(rows.label) != len(v["rows/label"]):
        return  # other positions: nothing below can be compared
    batch = gather_positions(v.draft, v.head, forward(v, replace=True), v.batch("last"), rows)
    p = teacher_distribution(v.head, batch.teacher, batch.teacher_index)
    chosen = v.candidates("rows/candidates")
    for suffix, implementation in distillations().items():
        supervision = Supervision(rows.label, rows.weight, p.clone(), chosen)
        distilled = implementation(batch.hidden, v.head, supervision, settings)
        for field in ("ce", "l1", "correct"):
            yield f"rows/{field}{suffix}", getattr(distilled, field), v[f"rows/{field}"]
    assert distilled.candidates is not None
    yield "rows/mass", distilled.candidates.mass, v["rows/mass"]
    refined = refinement_terms(
        v.draft, v.head, batch.pre_injection, rows.label, rows.predecessor, distilled.candidates
    )
    names = {"ce": "rce", "l1": "rl1", "correct": "refined_correct"}
    for field, value in refined._asdict().items():
        name = f"rows/{names.get(field, field)}"
        yield name, value, v[name]
    yield "rows/align", cosine_terms(v.draft, batch.features, rows.label), v["rows/align"]
    logits = F.linear(batch.hidden, v.head).double()
    own = logits.topk(settings.top_k, dim=-1).indices
    yield "rows/candidates", 1 + candidate_error(logits, own, v["rows/candidates"]), scalar(1.0)


def decode_quantities(v: Vectors) -> Quantities:
    """Candidates of block 0 by logits; then scores, choices and distributions in the file's candidate order (§6)."""
    out = forward(v, replace=False)
    anchor = v["inputs/input_ids"][v.anchors[0]]
    hidden, pre_injection = out.hidden[0, 0, 1:], out.pre_injection[0, 0, 1:]
    own, _ = candidates(v.draft, v.head, hidden)
    theirs = v.candidates("decode/candidates")
    logits = F.linear(hidden, v.head).double().masked_fill(excluded_mask(v.draft, v.head), -torch.inf)
    yield "decode/candidates", 1 + candidate_error(logits, own, v["decode/candidates"]), scalar(1.0)
    scores = transition_cache(v.draft, v.head, pre_injection, theirs, anchor)
    yield "decode/scores", scores, v["decode/scores"]
    yield "decode/greedy", walk(scores, theirs, GREEDY).tokens, v["decode/greedy"]
    states = (out.hidden[0, 0], out.pre_injection[0, 0])
    drafted = propose(v.draft, v.head, *states, anchor, GREEDY, refine=True)
    yield "decode/greedy, with our candidates", drafted.tokens, v["decode/greedy"]
    name = f"decode/path_probs_t{PATH_TEMPERATURE}"
    path = v["decode/path"].clamp(0, scores.shape[-1] - 1)
    yield name, path_probabilities(scores, path, PATH_TEMPERATURE), v[name]


def loss_quantities(v: Vectors) -> Quantities:
    """The chunked objective and the gradient of numerator / denominator by every weight (§5).

    In bfloat16 near ties change the top K, and with it the loss by a jump: there the file's candidates are used.
    """
    chosen = v.candidates("rows/candidates") if v.dtype is torch.bfloat16 else None
    inputs = (v.batch("input_ids"), v.loss_mask(), v.batch("taps"), v.batch("last"), v.blocks(replace=True))
    for normalization, (suffix, implementation) in product(("separate", "shared"), distillations().items()):
        v.model.normalization, v.model.distill = normalization, implementation
        v.draft.zero_grad()
        loss = v.model(*inputs, beta=v.scalars["beta"], candidates=chosen)
        total = loss.numerator / loss.denominator
        total.backward()
        for name, value in (("loss", total), ("numerator", loss.numerator), ("denominator", loss.denominator)):
            yield f"{name}_{normalization}{suffix}", value.double(), scalar(v.scalars[f"{name}_{normalization}"])
        for name, parameter in v.draft.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            yield f"grads_{normalization}/{name}{suffix}", grad, v[f"grads_{normalization}/{name}"]


GROUPS = (
    transfer_quantities,
    schedule_quantities,
    output_quantities,
    position_quantities,
    decode_quantities,
    loss_quantities,
)


def conformance(path: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> list[Check]:
    """Check every quantity of the vector file at ``path``, computed in ``dtype`` on ``device``.

    Raises:
        InvalidFileError: the file lacks a quantity, or an input cannot be used, by name.
        CheckpointError: the file's draft is not complete, by name.
    """
    try:
        vectors = Vectors(path, dtype, device)
        return [
            check(name, ours.cpu(), theirs.cpu(), dtype) for group in GROUPS for name, ours, theirs in group(vectors)
        ]
    except KeyError as error:
        raise InvalidFileError(f"{path}: {error.args[0]} is missing from it or from the JSON beside it") from error
