"""Acceptance length of greedy block drafting, replayed on the target's own greedy answers (§6, §8).

Greedy verification accepts a proposal exactly while it equals the target's argmax, so the accepted text is the
target's greedy answer whatever the draft proposes. Given that answer and the target's states over it (one
capture), every round is known without running the target again:

    anchor a → the draft proposes M tokens from the states strictly below a
             → n leading proposals equal ids[a + 1 ..]; the target adds one: the next anchor is a + n + 1

    τ = tokens / rounds,  tokens of a round = n + 1, cut at the answer's end

``decode_live`` runs the same loop against a real target, forward by forward, to check the replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from specforge_dspine.curriculum import Blocks
from specforge_dspine.decoding import draft_greedily
from specforge_dspine.model import DSpineDraftModel
from specforge_dspine.training_model import DSpineTrainingModel

VARIANTS = ("refined", "unrefined")
BOOTSTRAP = 10_000


@dataclass(frozen=True)
class Round:
    """One round of drafting: ``anchor`` position in the sequence, M ``proposed`` ids, how many were ``accepted``."""

    anchor: int
    proposed: tuple[int, ...]
    accepted: int


@dataclass(frozen=True)
class Trace:
    """All rounds of one prompt: ``ids`` [S] prompt and answer, the answer starting at ``prompt``."""

    name: str
    ids: tuple[int, ...]
    prompt: int
    rounds: tuple[Round, ...]

    @property
    def tokens(self) -> int:
        """Answer tokens that the rounds yielded: all but the first, which the prefill gives."""
        return len(self.ids) - self.prompt - 1

    def to_json(self) -> dict[str, Any]:
        """As report.json holds it."""
        return asdict(self)


def frozen_draft(draft: DSpineDraftModel, head: Tensor, embedding: Tensor) -> DSpineTrainingModel:
    """The draft between the target's tables E [V, H] and embedding [V, H], ready to propose."""
    linear = nn.Linear(head.shape[1], head.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(head, requires_grad=False)
    model = DSpineTrainingModel(
        draft,
        linear,
        nn.Embedding.from_pretrained(embedding, freeze=True),
        attention_backend="sdpa",
        num_anchors=0,
        loss_decay_gamma=None,
        objective_chunk_blocks=0,
        normalization="separate",
    )
    return model.eval()


@torch.no_grad()
def propose(model: DSpineTrainingModel, ids: Tensor, taps: Tensor, anchors: Tensor) -> dict[str, Tensor]:
    """Greedy proposals [N, M] of every block, with and without refinement.

    ``ids`` [S] need only be right up to each anchor; ``taps`` [S, T·H] up to the position below it.
    """
    blocks = Blocks(
        anchors=anchors[None],
        keep=torch.ones(1, len(anchors), dtype=torch.bool),
        replaced=torch.zeros(1, len(anchors), dtype=torch.bool),
    )
    out = model.draft_blocks(ids[None], taps[None], blocks)
    refined, plain = draft_greedily(
        model.draft_model, model.lm_head.weight, out.hidden[0], out.pre_injection[0], ids[anchors]
    )
    return {"refined": refined, "unrefined": plain}


def accepted_prefix(proposed: Sequence[int], truth: Sequence[int]) -> int:
    """How many leading ids of ``proposed`` equal ``truth``."""
    count = 0
    for ours, theirs in zip(proposed, truth, strict=False):
        if ours != theirs:
            break
        count += 1
    return count


def replay(model: DSpineTrainingModel, name: str, ids: Tensor, taps: Tensor, prompt: int) -> dict[str, Trace]:
    """Rounds of greedy drafting over an answer, for both variants.

    ``ids`` [S]: prompt and the target's greedy answer, which starts at position ``prompt``; ``taps`` [S, T·H].
    All anchors are drafted in one forward; the rounds then walk through them.
    """
    anchors = torch.arange(prompt, len(ids) - 1)
    proposals = propose(model, ids, taps, anchors)
    tokens = ids.tolist()
    traces = {}
    for variant in VARIANTS:
        rows, rounds, anchor = proposals[variant].tolist(), [], prompt
        while anchor < len(ids) - 1:
            proposed = rows[anchor - prompt]
            accepted = accepted_prefix(proposed, tokens[anchor + 1 :])
            rounds.append(Round(anchor, tuple(proposed), accepted))
            anchor += accepted + 1
        traces[variant] = Trace(name, tuple(tokens), prompt, tuple(rounds))
    return traces


@torch.no_grad()
def decode_live(
    model: DSpineTrainingModel, target: Any, layers: Sequence[int], prompt: Tensor, max_new_tokens: int, eos: set[int]
) -> tuple[list[int], list[Round]]:
    """Greedy speculative decoding with real verification, for the refined variant.

    ``target`` is a transformers causal LM in the draft's dtype, ``prompt`` [P] its input ids. Every round runs the
    target over the anchor and the M proposals, on the keys and values of what was accepted before; its states there
    are the next round's context. Returns the answer's ids and the rounds.
    """
    cache = DynamicCache()
    ids = prompt.clone()
    rounds: list[Round] = []

    def run(tokens: Tensor) -> tuple[Tensor, Tensor]:
        out = target(tokens[None], past_key_values=cache, use_cache=True, output_hidden_states=True)
        states = torch.cat([out.hidden_states[layer + 1][0] for layer in layers], dim=-1)
        return out.logits[0].argmax(dim=-1), states

    best, taps = run(ids)
    ids = torch.cat([ids, best[-1:]])
    while len(ids) - len(prompt) < max_new_tokens and int(ids[-1]) not in eos:
        anchor = len(ids) - 1
        padded = torch.cat([taps, taps.new_zeros(1, taps.shape[1])])  # the anchor's own state is never read
        proposed = propose(model, ids, padded, torch.tensor([anchor]))["refined"][0]
        best, states = run(torch.cat([ids[-1:], proposed]))  # [M + 1]
        accepted = accepted_prefix(proposed.tolist(), best.tolist())
        new = best[: accepted + 1].tolist()
        stop = next((i for i, token in enumerate(new) if token in eos), len(new) - 1)
        new = new[: min(stop + 1, max_new_tokens - (len(ids) - len(prompt)))]
        rounds.append(Round(anchor, tuple(proposed.tolist()), min(accepted, len(new))))
        ids = torch.cat([ids, torch.tensor(new)])
        taps = torch.cat([taps, states[: accepted + 1]])
        cache.crop(anchor + accepted + 1)
    return ids[len(prompt) :].tolist(), rounds


def tau(traces: Sequence[Trace]) -> float:
    """Mean acceptance length: tokens per round over all prompts."""
    rounds = sum(len(trace.rounds) for trace in traces)
    return sum(trace.tokens for trace in traces) / rounds if rounds else 0.0


def acceptance_by_position(traces: Sequence[Trace], proposals: int) -> list[float]:
    """Share of rounds [M] whose proposals 1..t were all accepted, among rounds with t answer tokens left."""
    shares = []
    for t in range(1, proposals + 1):
        reached = [r.accepted >= t for trace in traces for r in trace.rounds if r.anchor + t < len(trace.ids)]
        shares.append(float(np.mean(reached)) if reached else 0.0)
    return shares


def tau_interval(
    a: Sequence[Trace], b: Sequence[Trace] | None = None, *, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Bootstrap interval, resampling prompts, of τ(a), or of τ(a) − τ(b) on the same prompts."""
    generator = np.random.default_rng(seed)
    picks = generator.integers(0, len(a), size=(BOOTSTRAP, len(a)))

    def draws(traces: Sequence[Trace]) -> np.ndarray:
        tokens = np.array([trace.tokens for trace in traces])
        rounds = np.array([len(trace.rounds) for trace in traces])
        return tokens[picks].sum(axis=1) / rounds[picks].sum(axis=1)

    values = draws(a) - (draws(b) if b is not None else 0.0)
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
