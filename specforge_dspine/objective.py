"""The dual-output distillation objective (§5).

Per supervised row (slot t ≥ 1 of a block, label y, weight w = exp(−(t−1)/γ), teacher p):

    backbone    CE = −log q(y)                    ℓ1 = ‖q − p‖₁                    over V
    refinement  CE_r = −log q̃(y) where covered    ℓ1_r = ‖q̃ − p̃‖₁ where heavy      over the K candidates
    alignment   Σ_ℓ w (1 − cos(e_ℓ, C_y))         or, as a variant, Σ_ℓ w (−log softmax(E · norm(h_ℓ))_y)

and with W, W_c, W_m the weights of all, the covered and the heavy rows of a micro-batch:

    L_bb   = (α ΣwCE + (1−α) Σwℓ1) / W
    L_ref  = α ΣwCE_r / W_c + (1−α) Σwℓ1_r / W_m      ("separate"; "shared" divides by W instead)
    L      = L_bb + L_ref + λ ΣwAlign / W,    λ = β · stop_grad(ΣwCE / W over the optimizer window and all ranks)

The loss travels as a numerator and a denominator, (W·L, W): SpecForge sums both over micro-batches and ranks. With
``normalization_scope: window``, W, W_c and W_m are the window's: then Σ W·L / Σ W does not depend on how the window
is split. What the window sums to comes from outside (window.py): of a micro-batch alone they are its own.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """What one row contributes, [n] each but ``align`` [n, L]; the last five carry no gradient. What a variant
    leaves out is 0 or False (``reported`` knows which)."""

    ce: Tensor
    l1: Tensor
    refined_ce: Tensor  # 0 where the label is no candidate
    refined_l1: Tensor  # 0 where the candidates' teacher mass is at most the threshold
    align: Tensor  # 1 − cos, or the layer's CE; one column per layer, none where alignment is off
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


# ΣwCE, W, W_c, W_m: of a micro-batch → of its optimizer window over all ranks, [4] each.
Share = Callable[[Tensor], Tensor]


def alone(own: Tensor) -> Tensor:
    """The share of a micro-batch that is its whole window: ``own`` [4] itself."""
    return own


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


def wide(*dtypes: torch.dtype) -> torch.dtype:
    """Softmaxes are taken in float32, or wider if an input is."""
    result = torch.float32
    for dtype in dtypes:
        result = torch.promote_types(result, dtype)
    return result


@torch.no_grad()
def teacher_distribution(head: Tensor, teacher: Tensor, position: Tensor) -> Tensor:
    """p = softmax(E · final state) [n, V] of the states number ``position`` [n] in ``teacher`` [R·S, H]."""
    needed, row = position.unique(return_inverse=True)  # blocks overlap: a position's p serves several rows
    return F.linear(teacher[needed], head).to(wide(head.dtype)).softmax(dim=-1)[row]


class Candidates(NamedTuple):
    """The backbone's choice for the refinement: ids [n, K]; their renormalised teacher p̃ [n, K] and its ``mass`` [n];
    which of them ``is_label`` [n, K]; ``covered``, ``heavy`` [n] (bool)."""

    ids: Tensor
    p: Tensor
    mass: Tensor
    is_label: Tensor
    covered: Tensor
    heavy: Tensor


@torch.no_grad()
def choose_candidates(
    logits: Tensor, p: Tensor | None, label: Tensor, settings: DSpineSettings, chosen: Tensor | None = None
) -> Candidates:
    """Top K of ``logits`` [n, V], detached, the label not inserted; ``chosen`` [n, K] overrides them.

    ``p`` [n, V] the teacher's, None where nothing of the loss needs it; ``label`` [n].
    """
    ids = logits.topk(settings.top_k, dim=-1).indices if chosen is None else chosen
    is_label = ids == label.unsqueeze(-1)
    of_teacher = torch.zeros_like(ids, dtype=logits.dtype) if p is None else p.gather(-1, ids)
    mass = of_teacher.sum(dim=-1)
    p_candidates = of_teacher / mass.clamp_min(torch.finfo(mass.dtype).tiny).unsqueeze(-1)
    return Candidates(
        ids, p_candidates, mass, is_label, is_label.any(dim=-1), mass > settings.candidate_mass_threshold
    )


def refinement_terms(
    draft: DSpineDraftModel, head: Tensor, pre_injection: Tensor, predecessor: Tensor, c: Candidates
) -> tuple[Tensor, Tensor, Tensor]:
    """CE_r, ℓ1_r [n], and whether the best candidate is the label [n]: q̃ = softmax(E_c · refined) over K.

    ``pre_injection`` u_L [n, H], not detached; ``predecessor`` [n] the right tokens.
    """
    refined = draft.refine(pre_injection, predecessor)
    scores = torch.einsum("nh,nkh->nk", refined, head[c.ids]).to(wide(head.dtype))
    log_q = scores.log_softmax(dim=-1)
    ce = -(log_q * c.is_label).sum(dim=-1)
    l1 = (log_q.exp() - c.p).abs().sum(dim=-1) * c.heavy
    best = scores.argmax(dim=-1, keepdim=True)
    return ce, l1, c.is_label.gather(-1, best).squeeze(-1)


def alignment_terms(draft: DSpineDraftModel, head: Tensor, features: Tensor, label: Tensor) -> Tensor:
    """Per layer, [n, L]: 1 − cos(e_ℓ, C_y) of ``features`` e [n, L, r], or −log softmax(E · norm(h_ℓ))_y of norm(h)
    [n, L, H]."""
    if draft.settings.alignment == "cosine":
        codes = draft.transfer_codes[label].to(wide(head.dtype))
        return 1 - F.cosine_similarity(features.to(codes.dtype), codes.unsqueeze(1), dim=-1)
    losses = [
        F.cross_entropy(F.linear(state, head).to(wide(head.dtype)), label, reduction="none")
        for state in features.unbind(dim=1)  # a layer at a time: one [n, V] more, not L of them
    ]
    return torch.stack(losses, dim=-1)


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
    ``hidden`` norm(h_L) and ``pre_injection`` u_L [n, H]; ``features`` [n, L, ..] as ``alignment_terms`` takes them;
    ``label``, ``predecessor`` [n]; ``candidates`` [n, K] instead of the backbone's own (conformance).
    """
    settings = draft.settings
    logits = F.linear(hidden, head).to(wide(head.dtype))
    log_q = logits.log_softmax(dim=-1)
    ce = -log_q.gather(-1, label.unsqueeze(-1)).squeeze(-1)
    zero, never = torch.zeros_like(ce), torch.zeros_like(label, dtype=torch.bool)
    p = teacher_distribution(head, teacher, position) if settings.ce_weight < 1 else None
    terms = RowTerms(
        ce=ce,
        l1=zero if p is None else (log_q.exp() - p).abs().sum(dim=-1),
        refined_ce=zero,
        refined_l1=zero,
        align=zero.new_zeros(len(label), 0),
        covered=never,
        heavy=never,
        mass=zero,
        correct=logits.argmax(dim=-1) == label,
        refined_correct=never,
    )
    if settings.refinement:
        c = choose_candidates(logits, p, label, settings, candidates)
        refined_ce, refined_l1, best = refinement_terms(draft, head, pre_injection, predecessor, c)
        terms = terms._replace(
            refined_ce=refined_ce,
            refined_l1=refined_l1,
            covered=c.covered,
            heavy=c.heavy,
            mass=c.mass,
            refined_correct=best,
        )
    if settings.alignment != "off":
        terms = terms._replace(align=alignment_terms(draft, head, features, label))
    return terms


def gathered(output: DraftOutput, rows: Rows, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per row: hidden, pre_injection [n, H], features [n, L, r or H] ([n, 0] without alignment), and the number [n]
    of its teacher's state.

    ``length`` S; states of [R, S, H] are numbered sequence by sequence.
    """
    where = (rows.sequence, rows.block, rows.slot)
    if output.features is None:
        features = output.hidden.new_zeros(len(rows.label), 0)
    else:
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


def own_share(sums: dict[str, Tensor]) -> Tensor:
    """ΣwCE, W, W_c, W_m of a micro-batch, [4], detached: what the rest of its window needs to know of it."""
    return torch.stack([sums[name] for name in ("ce", "weight", "covered", "heavy")]).detach()


def combine(
    sums: dict[str, Tensor], settings: DSpineSettings, normalization: str, scope: str, beta: float, share: Share
) -> Loss:
    """Numerator and denominator of L from a micro-batch's sums (``row_sums`` by name)."""
    alpha, total = settings.ce_weight, sums["weight"]
    own = own_share(sums)
    window = share(own)
    gate = ratio(window[0], window[1])
    _, weight, covered, heavy = window if scope == "window" else own
    if normalization == "shared":
        covered = heavy = weight
    backbone = alpha * sums["ce"] + (1 - alpha) * sums["l1"]
    refinement = alpha * ratio(sums["refined_ce"], covered) + (1 - alpha) * ratio(sums["refined_l1"], heavy)
    numerator = backbone + weight * refinement + beta * gate * sums["align"].sum()
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
        "gate": (gate * one, one),
        "lambda": (beta * gate * one, one),
    }
    detached = {name: (n.detach(), d.detach()) for name, (n, d) in parts.items() if reported(name, settings)}
    return Loss(numerator=numerator, denominator=total, parts=detached)


def reported(name: str, settings: DSpineSettings) -> bool:
    """Does the part ``name`` exist in this variant?"""
    if name in ("align", "lambda", "gate", "beta"):
        return settings.alignment != "off"
    if name in ("l1", "refined_l1", "heavy", "candidate_mass") and settings.ce_weight == 1:
        return False
    if name.startswith("refined_") or name in ("coverage", "heavy", "candidate_mass"):
        return settings.refinement
    return True


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
    scope: str,
    chunk_blocks: int,
    share: Share = alone,
    candidates: Tensor | None = None,
) -> Loss:
    """L of a micro-batch as numerator and denominator; ``share`` as its window gives it.

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
    loss = combine(sums, draft.settings, normalization, scope, beta, share)
    counted, correct, refined = (sums[name].reshape(-1, proposals) for name in GRIDS)
    loss.parts["rows"] = (counted.sum(), torch.ones_like(loss.denominator))
    loss.parts.update(accuracy_parts(counted, correct))
    if draft.settings.refinement:
        loss.parts.update(accuracy_parts(counted, refined, "refined_"))
    return loss


@torch.no_grad()
def look_ahead(
    draft: DSpineDraftModel,
    head: Tensor,
    output: DraftOutput,
    last_hidden: Tensor,
    rows: Rows,
    *,
    weights: bool,
    chunk_blocks: int,
) -> Tensor:
    """ΣwCE, W, W_c, W_m [4] of a micro-batch without its loss; W_c and W_m are 0 unless ``weights`` asks for them.

    Arguments as for ``objective``.
    """
    hidden, _, _, position = gathered(output, rows, last_hidden.shape[1])
    teacher, settings = last_hidden.flatten(0, 1), draft.settings

    def chunk(hidden: Tensor, position: Tensor, weight: Tensor, label: Tensor) -> tuple[Tensor, ...]:
        logits = F.linear(hidden, head).to(wide(head.dtype))
        w = weight.to(logits.dtype)
        ce = F.cross_entropy(logits, label, reduction="none")
        covered, heavy = torch.zeros_like(ce), torch.zeros_like(ce)
        if weights and settings.refinement:
            p = teacher_distribution(head, teacher, position) if settings.ce_weight < 1 else None
            c = choose_candidates(logits, p, label, settings)
            covered, heavy = c.covered.to(w.dtype), c.heavy.to(w.dtype)
        return (torch.stack([(w * ce).sum(), w.sum(), (w * covered).sum(), (w * heavy).sum()]),)

    size = chunk_blocks * (output.hidden.shape[2] - 1)
    (total,) = checkpointed_chunk_reduce(chunk, hidden, position, rows.weight, rows.label, chunk_size=size)
    return total
