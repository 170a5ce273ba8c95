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
from itertools import repeat
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from specforge.core.chunking import checkpointed_chunk_reduce
from torch import Tensor

from specforge_dspine.modeling.draft_model import DraftOutput, DSpineDraftModel
from specforge_dspine.modeling.settings import DSpineSettings
from specforge_dspine.objective.distillation import (
    Candidates,
    Distill,
    choose_candidates,
    distill,
    teacher_distribution,
    wide,
)
from specforge_dspine.objective.supervision import Rows, gathered


class Refined(NamedTuple):
    """What the refinement of one row gives, [n] each; the last three carry no gradient."""

    ce: Tensor  # 0 where the label is no candidate
    l1: Tensor  # 0 where the candidates' teacher mass is at most the threshold
    covered: Tensor  # bool: the label is a candidate
    heavy: Tensor  # bool: mass > threshold
    correct: Tensor  # bool: the refinement's best candidate is the label


class Loss(NamedTuple):
    """``numerator`` = W·L and ``denominator`` = W (scalars); ``parts``: name → (sum, count), detached."""

    numerator: Tensor
    denominator: Tensor
    parts: dict[str, tuple[Tensor, Tensor]]


# ΣwCE, W, W_c, W_m: of a micro-batch → of its optimizer window over all ranks, [4] each.
WindowReduce = Callable[[Tensor], Tensor]


def identity(own: Tensor) -> Tensor:
    """The share of a micro-batch that is its whole window: ``own`` [4] itself."""
    return own


def refinement_terms(
    draft: DSpineDraftModel, head: Tensor, pre_injection: Tensor, label: Tensor, predecessor: Tensor, c: Candidates
) -> Refined:
    """q̃ = softmax(E_c · refined) over the K candidates c, against the label and p̃.

    ``head`` E [V, H]; ``pre_injection`` u_L [n, H], not detached; ``label``, ``predecessor`` (the right ones) [n].
    """
    refined = draft.refine(pre_injection, predecessor)
    scores = torch.einsum("nh,nkh->nk", refined, head[c.ids]).to(wide(head.dtype))
    log_q = scores.log_softmax(dim=-1)
    is_label, heavy = c.ids == label.unsqueeze(-1), c.mass > draft.settings.candidate_mass_threshold
    return Refined(
        ce=-(log_q * is_label).sum(dim=-1),
        l1=(log_q.exp() - c.p).abs().sum(dim=-1) * heavy,
        covered=is_label.any(dim=-1),
        heavy=heavy,
        correct=is_label.gather(-1, scores.argmax(dim=-1, keepdim=True)).squeeze(-1),
    )


def cosine_terms(draft: DSpineDraftModel, features: Tensor, label: Tensor) -> Tensor:
    """1 − cos(e_ℓ, C_y) per layer, [n, L], of ``features`` e [n, L, r]."""
    codes = draft.transfer_codes[label].to(wide(features.dtype))
    return 1 - F.cosine_similarity(features.to(codes.dtype), codes.unsqueeze(1), dim=-1)


def alignment_sums(draft: DSpineDraftModel, head: Tensor, features: Tensor, label: Tensor, weight: Tensor) -> Tensor:
    """Σ over n rows of w times the alignment's term, per layer [L]; [0] without alignment.

    ``features`` [n, L, r] as ``cosine_terms`` takes them, or norm(h_ℓ) [n, L, H] whose term is −log softmax(E ·)_y.
    """
    if draft.settings.alignment == "off":
        return torch.zeros(0, dtype=wide(head.dtype), device=label.device)
    if draft.settings.alignment == "cosine":
        terms = cosine_terms(draft, features, label)
        return (weight.to(terms.dtype).unsqueeze(-1) * terms).sum(dim=0)
    plain = draft.settings.model_copy(update={"ce_weight": 1.0, "refinement": False})
    states = features.unbind(dim=1)  # a layer at a time: its logits go before the next one's come
    return torch.stack([distill(state, head, label, weight, None, plain).loss for state in states])


# Sums over rows: scalars, but "align" [L].
BACKBONE = ("backbone", "ce", "l1", "weight", "mass")
REST = ("refined_ce", "refined_l1", "covered", "heavy", "align")


def backbone_sums(
    head: Tensor,
    teacher: Tensor,
    hidden: Tensor,
    rows: Rows,
    position: Tensor,
    settings: DSpineSettings,
    *,
    chunk: int,
    distill: Distill,
    chosen: Tensor | None,
) -> tuple[dict[str, Tensor], Tensor, Candidates | None]:
    """Σ over n rows of what BACKBONE names ("backbone" alone backpropagates), which argmaxes are right [n], and the
    candidates. At most ``chunk`` rows' logits exist at a time (0: all).

    ``head`` E [V, H]; ``teacher`` [R·S, H], of which row n's is number ``position`` [n]; ``hidden`` norm(h_L) [n, H].
    """
    size = chunk or len(position)
    parts = []
    for states, label, weight, where, picked in zip(
        hidden.split(size),
        rows.label.split(size),
        rows.weight.split(size),
        position.split(size),
        repeat(None) if chosen is None else chosen.split(size),
        strict=False,
    ):
        p = teacher_distribution(head, teacher, where) if settings.ce_weight < 1 else None
        parts.append(distill(states, head, label, weight, p, settings, picked))
    ce, l1, correct = (torch.cat([getattr(part, name) for part in parts]) for name in ("ce", "l1", "correct"))
    candidates = None
    if settings.refinement:
        chosen_parts = [part.candidates for part in parts if part.candidates is not None]
        candidates = Candidates(*(torch.cat(fields) for fields in zip(*chosen_parts, strict=True)))
    w = rows.weight.to(ce.dtype)
    mass = w.new_zeros(()) if candidates is None else (w * candidates.mass).sum()
    values = (torch.stack([part.loss for part in parts]).sum(), (w * ce).sum(), (w * l1).sum(), w.sum(), mass)
    return dict(zip(BACKBONE, values, strict=True)), correct, candidates


def other_sums(
    draft: DSpineDraftModel,
    head: Tensor,
    pre_injection: Tensor,
    features: Tensor,
    rows: Rows,
    candidates: Candidates | None,
    *,
    chunk: int,
) -> tuple[dict[str, Tensor], Tensor]:
    """Σ over n rows of what REST names, and which refined choices are right [n]; recomputed in the backward pass,
    ``chunk`` rows at a time (0: kept).

    ``pre_injection`` u_L [n, H], ``features`` [n, L, ..] as ``alignment_sums`` takes them.
    """

    def terms(
        pre: Tensor, states: Tensor, weight: Tensor, label: Tensor, predecessor: Tensor, number: Tensor, *c: Any
    ) -> tuple[Tensor, ...]:
        w = weight.to(wide(head.dtype))
        zero = w.new_zeros(())
        refined: tuple[Tensor, ...] = (zero, zero, zero, zero)
        correct = torch.zeros(len(rows.label), dtype=torch.bool, device=label.device)
        if c[0] is not None:
            r = refinement_terms(draft, head, pre, label, predecessor, Candidates(*c))
            refined = tuple((w * value).sum() for value in (r.ce, r.l1, r.covered, r.heavy))
            correct = correct.index_put((number,), r.correct)
        return (*refined, alignment_sums(draft, head, states, label, weight), correct)

    number = torch.arange(len(rows.label), device=rows.label.device)
    columns = (None, None, None) if candidates is None else candidates
    *values, correct = checkpointed_chunk_reduce(
        terms,
        pre_injection,
        features,
        rows.weight,
        rows.label,
        rows.predecessor,
        number,
        *columns,
        chunk_size=chunk,
    )
    return dict(zip(REST, values, strict=True)), correct


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, and 0 where nothing was counted."""
    safe = torch.where(denominator > 0, denominator, torch.ones_like(denominator))
    return torch.where(denominator > 0, numerator / safe, torch.zeros_like(numerator))


def micro_batch_sums(sums: dict[str, Tensor]) -> Tensor:
    """ΣwCE, W, W_c, W_m of a micro-batch, [4], detached: what the rest of its window needs to know of it."""
    return torch.stack([sums[name] for name in ("ce", "weight", "covered", "heavy")]).detach()


def combine(
    sums: dict[str, Tensor],
    settings: DSpineSettings,
    normalization: str,
    scope: str,
    beta: float,
    window_reduce: WindowReduce,
) -> Loss:
    """Numerator and denominator of L from a micro-batch's ``sums`` (BACKBONE and REST by name)."""
    alpha, total = settings.ce_weight, sums["weight"]
    own = micro_batch_sums(sums)
    window = window_reduce(own)
    gate = ratio(window[0], window[1])
    _, weight, covered, heavy = window if scope == "window" else own
    if normalization == "shared":
        covered = heavy = weight
    refinement = alpha * ratio(sums["refined_ce"], covered) + (1 - alpha) * ratio(sums["refined_l1"], heavy)
    numerator = sums["backbone"] + weight * refinement + beta * gate * sums["align"].sum()
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
    if name in ("replacement_probability", "replaced_share"):
        return settings.curriculum
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
    window_reduce: WindowReduce = identity,
    distill: Distill = distill,
    candidates: Tensor | None = None,
) -> Loss:
    """L of a micro-batch as numerator and denominator; ``window_reduce`` as its window gives it.

    ``head`` E [V, H], ``last_hidden`` [R, S, H]. At most ``chunk_blocks``·M rows' logits [.., V] exist at a time,
    whatever N is; 0 keeps all rows at once. ``candidates`` [n, K] replaces the backbone's own (conformance).
    """
    sequences, count, block, _ = output.hidden.shape
    chunk = chunk_blocks * (block - 1)
    hidden, pre_injection, features, position = gathered(output, rows, last_hidden.shape[1])
    teacher = last_hidden.detach().flatten(0, 1)  # everything from the target is detached
    backbone, correct, chosen = backbone_sums(
        head, teacher, hidden, rows, position, draft.settings, chunk=chunk, distill=distill, chosen=candidates
    )
    rest, refined_correct = other_sums(draft, head, pre_injection, features, rows, chosen, chunk=chunk)
    loss = combine(backbone | rest, draft.settings, normalization, scope, beta, window_reduce)

    def grid(values: Tensor) -> Tensor:
        """Rows by block and position, [R·N, M]."""
        cells = torch.zeros(sequences, count, block - 1, device=values.device)
        where = (rows.sequence, rows.block, rows.slot - 1)
        return cells.index_put(where, (values & (rows.weight > 0)).float()).flatten(0, 1)

    counted = grid(torch.ones_like(correct))
    loss.parts["rows"] = (counted.sum(), torch.ones_like(loss.denominator))
    loss.parts.update(accuracy_parts(counted, grid(correct)))
    if draft.settings.refinement:
        loss.parts.update(accuracy_parts(counted, grid(refined_correct), "refined_"))
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
            c = choose_candidates(logits, p, settings.top_k)
            covered = (c.ids == label.unsqueeze(-1)).any(dim=-1).to(w.dtype)
            heavy = (c.mass > settings.candidate_mass_threshold).to(w.dtype)
        return (torch.stack([(w * ce).sum(), w.sum(), (w * covered).sum(), (w * heavy).sum()]),)

    size = chunk_blocks * (output.hidden.shape[2] - 1)
    (total,) = checkpointed_chunk_reduce(chunk, hidden, position, rows.weight, rows.label, chunk_size=size)
    return total
