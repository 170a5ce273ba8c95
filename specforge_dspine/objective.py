"""The dual-output distillation objective (§5).

Per supervised row (slot t ≥ 1 of a block, label y, weight w = exp(−(t−1)/γ), teacher p):

    backbone    CE = −log q(y)                    ℓ1 = ‖q − p‖₁                    over V
    refinement  CE_r = −log q̃(y) where covered    ℓ1_r = ‖q̃ − p̃‖₁ where heavy      over the K candidates
    alignment   Σ_ℓ w (1 − cos(e_ℓ, C_y))

and with W, W_c, W_m the weights of all, the covered and the heavy rows of a micro-batch:

    L_bb   = (α ΣwCE + (1−α) Σwℓ1) / W
    L_ref  = α ΣwCE_r / W_c + (1−α) Σwℓ1_r / W_m      ("separate"; "shared" divides by W instead)
    L      = L_bb + L_ref + λ ΣwAlign / W,    λ = β · stop_grad(ΣwCE / W)

The loss travels as a numerator and a denominator, (W·L, W): SpecForge sums both over micro-batches and ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from specforge.core.chunking import checkpointed_chunk_reduce
from torch import Tensor

from specforge_dspine.config import DSpineSettings
from specforge_dspine.curriculum import Blocks
from specforge_dspine.model import DraftOutput, DSpineDraftModel


class Rows(NamedTuple):
    """Supervised rows, n of them: indices ``sequence``, ``block``, ``slot`` [n] into [R, N, B] (slot ≥ 1);
    ``label`` y and ``predecessor`` token ids [n]; ``position`` [n] of the predecessor, whose final state is
    the teacher's; ``weight`` w [n], float32."""

    sequence: Tensor
    block: Tensor
    slot: Tensor
    label: Tensor
    predecessor: Tensor
    position: Tensor
    weight: Tensor


class RowTerms(NamedTuple):
    """What one row contributes, [n] each but ``align`` [n, L]; the last five carry no gradient."""

    ce: Tensor
    l1: Tensor
    refined_ce: Tensor  # 0 where the label is no candidate
    refined_l1: Tensor  # 0 where the candidates' teacher mass is at most the threshold
    align: Tensor  # 1 − cos, one column per layer
    covered: Tensor  # bool: the label is a candidate
    heavy: Tensor  # bool: mass > threshold
    mass: Tensor  # teacher mass of the candidates
    correct: Tensor  # bool: the backbone's argmax is the label
    refined_correct: Tensor  # bool: the refinement's best candidate is the label


class Loss(NamedTuple):
    """``numerator`` = W·L and ``denominator`` = W (scalars); ``parts``: name → (sum, count), detached."""

    numerator: Tensor
    denominator: Tensor
    parts: dict[str, tuple[Tensor, Tensor]]


def supervised_rows(
    input_ids: Tensor, loss_mask: Tensor, blocks: Blocks, block_size: int, gamma: float | None
) -> Rows:
    """Row (block a, slot t ≥ 1), label ids[a + t], counts while ``loss_mask`` [R, S] is 1 on all of a+1..a+t
    and a + t < S: the contiguous supervised prefix. ``input_ids`` [R, S]. w = exp(−(t−1)/γ); γ None: 1.

    Where nothing is supervised, one row of weight 0 stands in, so that every parameter still gets a gradient.
    """
    length = input_ids.shape[1]
    slots = torch.arange(1, block_size, device=input_ids.device)
    positions = blocks.anchors.unsqueeze(-1) + slots  # [R, N, M]
    inside = (positions < length) & blocks.keep.unsqueeze(-1)
    flat = positions.clamp(max=length - 1).flatten(1)
    supervised = loss_mask.gather(1, flat).reshape(positions.shape) > 0
    prefix = (supervised & inside).long().cumprod(dim=-1).bool()
    empty = ~prefix.any()
    if empty:
        prefix[0, 0, 0] = True
    sequence, block, column = prefix.nonzero(as_tuple=True)
    label_at = positions[sequence, block, column].clamp(max=length - 1)
    weight = torch.exp(-column / gamma) if gamma else torch.ones_like(column, dtype=torch.float32)
    return Rows(
        sequence=sequence,
        block=block,
        slot=column + 1,
        label=input_ids[sequence, label_at],
        predecessor=input_ids[sequence, (label_at - 1).clamp(min=0)],
        position=(label_at - 1).clamp(min=0),
        weight=torch.zeros_like(weight) if empty else weight,
    )


def row_terms(
    draft: DSpineDraftModel,
    head: Tensor,
    teacher: Tensor,
    hidden: Tensor,
    pre_injection: Tensor,
    features: Tensor,
    position: Tensor,
    label: Tensor,
    predecessor: Tensor,
    candidates: Tensor | None = None,
) -> RowTerms:
    """Every term of n rows, softmaxes in ≥ float32.

    ``head`` E [V, H]; ``teacher`` final post-norm states [R·S, H], of which row n's is number ``position`` [n];
    ``hidden`` norm(h_L) and ``pre_injection`` u_L [n, H]; ``features`` e [n, L, r]; ``label``, ``predecessor`` [n].
    The candidates are the backbone's top K over all V rows, detached, the label not inserted; ``candidates``
    [n, K] overrides them (conformance).
    """
    settings = draft.settings
    wide = torch.promote_types(head.dtype, torch.float32)
    logits = F.linear(hidden, head).to(wide)
    log_q = logits.log_softmax(dim=-1)
    with torch.no_grad():
        needed, row = position.unique(return_inverse=True)  # blocks overlap: a position's p serves several rows
        p = F.linear(teacher[needed], head).to(wide).softmax(dim=-1)[row]
        if candidates is None:
            candidates = logits.topk(settings.top_k, dim=-1).indices
        mass = p.gather(-1, candidates).sum(dim=-1)
        p_candidates = p.gather(-1, candidates) / mass.clamp_min(torch.finfo(wide).tiny).unsqueeze(-1)
        is_label = candidates == label.unsqueeze(-1)
        covered, heavy = is_label.any(dim=-1), mass > settings.candidate_mass_threshold
    ce = -log_q.gather(-1, label.unsqueeze(-1)).squeeze(-1)
    l1 = (log_q.exp() - p).abs().sum(dim=-1)

    refined = draft.refine(pre_injection, predecessor)
    scores = torch.einsum("nh,nkh->nk", refined, head[candidates]).to(wide)
    log_q_refined = scores.log_softmax(dim=-1)
    refined_ce = -(log_q_refined * is_label).sum(dim=-1)
    refined_l1 = (log_q_refined.exp() - p_candidates).abs().sum(dim=-1) * heavy

    codes = draft.transfer_codes[label].to(wide)
    align = 1 - F.cosine_similarity(features.to(wide), codes.unsqueeze(1), dim=-1)
    return RowTerms(
        ce=ce,
        l1=l1,
        refined_ce=refined_ce,
        refined_l1=refined_l1,
        align=align,
        covered=covered,
        heavy=heavy,
        mass=mass,
        correct=logits.argmax(dim=-1) == label,
        refined_correct=candidates.gather(-1, scores.argmax(dim=-1, keepdim=True)).squeeze(-1) == label,
    )


def gathered(output: DraftOutput, rows: Rows, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per row: hidden, pre_injection [n, H], features [n, L, r], and the number [n] of its teacher's state.

    ``length`` S; states of [R, S, H] are numbered sequence by sequence.
    """
    assert output.features is not None
    where = (rows.sequence, rows.block, rows.slot)
    features = output.features[:, rows.sequence, rows.block, rows.slot].transpose(0, 1)
    return output.hidden[where], output.pre_injection[where], features, rows.sequence * length + rows.position


# What a chunk yields, summed over chunks: scalars, but "align" [L] and the grids over (block, slot) [R·N, M].
SUMS = ("ce", "l1", "refined_ce", "refined_l1", "align", "weight", "covered", "heavy", "mass")
GRIDS = ("counted", "correct", "refined_correct")


def row_sums(terms: RowTerms, weight: Tensor, cell: Tensor, cells: int) -> tuple[Tensor, ...]:
    """Σ over n rows of everything the loss and the metrics need, in the order SUMS + GRIDS.

    ``weight`` w [n]; ``cell`` [n] numbers the row's (block, slot) among ``cells`` = R·N·M.
    """

    def weighted(values: Tensor) -> Tensor:
        return (weight.to(terms.ce.dtype) * values).sum()

    def grid(values: Tensor) -> Tensor:
        return torch.zeros(cells, device=cell.device).index_put((cell,), (values & (weight > 0)).float())

    return (
        weighted(terms.ce),
        weighted(terms.l1),
        weighted(terms.refined_ce),
        weighted(terms.refined_l1),
        (weight.to(terms.align.dtype).unsqueeze(-1) * terms.align).sum(dim=0),
        weight.to(terms.ce.dtype).sum(),
        weighted(terms.covered),
        weighted(terms.heavy),
        weighted(terms.mass),
        grid(torch.ones_like(terms.correct)),
        grid(terms.correct),
        grid(terms.refined_correct),
    )


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, and 0 where nothing was counted."""
    safe = torch.where(denominator > 0, denominator, torch.ones_like(denominator))
    return torch.where(denominator > 0, numerator / safe, torch.zeros_like(numerator))


def combine(sums: dict[str, Tensor], settings: DSpineSettings, normalization: str, beta: float) -> Loss:
    """Numerator and denominator of L from a micro-batch's sums (``row_sums`` by name)."""
    alpha, total = settings.ce_weight, sums["weight"]
    covered, heavy = (sums["covered"], sums["heavy"]) if normalization == "separate" else (total, total)
    backbone = alpha * sums["ce"] + (1 - alpha) * sums["l1"]
    refinement = alpha * ratio(sums["refined_ce"], covered) + (1 - alpha) * ratio(sums["refined_l1"], heavy)
    gate = ratio(sums["ce"], total).detach()
    numerator = backbone + total * refinement + beta * gate * sums["align"].sum()
    one = torch.ones_like(total)
    parts = {
        "ce": (sums["ce"], total),
        "l1": (sums["l1"], total),
        "refined_ce": (sums["refined_ce"], sums["covered"]),
        "refined_l1": (sums["refined_l1"], sums["heavy"]),
        "align": (sums["align"], total.expand_as(sums["align"])),
        "coverage": (sums["covered"], total),
        "heavy": (sums["heavy"], total),
        "candidate_mass": (sums["mass"], total),
        "lambda": (beta * gate * one, one),
    }
    detached = {name: (n.detach(), d.detach()) for name, (n, d) in parts.items()}
    return Loss(numerator=numerator, denominator=total, parts=detached)


def accuracy_parts(counted: Tensor, correct: Tensor, prefix: str = "") -> dict[str, tuple[Tensor, Tensor]]:
    """Accuracy, accuracy by position, and simulated τ (teacher-forced greedy prefix + 1, mean over blocks).

    ``counted`` and ``correct`` [R·N, M] hold 1 for supervised rows and for right ones.
    """
    prefixes = correct.cumprod(dim=-1).sum(dim=-1)
    blocks = counted[:, 0]
    return {
        f"{prefix}accuracy": (correct.sum(), counted.sum()),
        f"{prefix}accuracy_at": (correct.sum(dim=0), counted.sum(dim=0)),
        f"{prefix}tau": ((prefixes + 1).mul(blocks).sum(), blocks.sum()),
    }


def objective(
    draft: DSpineDraftModel,
    head: Tensor,
    output: DraftOutput,
    last_hidden: Tensor,
    rows: Rows,
    *,
    beta: float,
    normalization: str,
    chunk_blocks: int,
    candidates: Tensor | None = None,
) -> Loss:
    """L of a micro-batch as numerator and denominator.

    ``head`` E [V, H], ``last_hidden`` [R, S, H]. At most ``chunk_blocks``·M rows' logits [.., V] exist at a
    time, whatever N is: each chunk is recomputed in the backward pass. 0 keeps all rows at once.
    ``candidates`` [n, K] as for ``row_terms``.
    """
    sequences, count, block, _ = output.hidden.shape
    proposals = block - 1
    cells = sequences * count * proposals
    cell = (rows.sequence * count + rows.block) * proposals + rows.slot - 1
    teacher = last_hidden.detach().flatten(0, 1)  # everything from the target is detached

    def chunk(
        hidden: Tensor,
        pre_injection: Tensor,
        features: Tensor,
        position: Tensor,
        weight: Tensor,
        where: Tensor,
        label: Tensor,
        predecessor: Tensor,
        chosen: Tensor | None,
    ) -> tuple[Tensor, ...]:
        terms = row_terms(draft, head, teacher, hidden, pre_injection, features, position, label, predecessor, chosen)
        return row_sums(terms, weight, where, cells)

    totals = checkpointed_chunk_reduce(
        chunk,
        *gathered(output, rows, last_hidden.shape[1]),
        rows.weight,
        cell,
        rows.label,
        rows.predecessor,
        candidates,
        chunk_size=chunk_blocks * proposals,
    )
    sums = dict(zip(SUMS + GRIDS, totals, strict=True))
    loss = combine(sums, draft.settings, normalization, beta)
    counted, correct, refined = (sums[name].reshape(-1, proposals) for name in GRIDS)
    loss.parts["rows"] = (counted.sum(), torch.ones_like(loss.denominator))
    loss.parts.update(accuracy_parts(counted, correct) | accuracy_parts(counted, refined, "refined_"))
    return loss
