"""A round of decoding taken apart: backbone, candidates, transition cache, walk, verification.

The draft works on a context of one whole sequence, of which the last few tokens are new, as after a round before. The
target's forward, which takes most of a real round, is no part of it: ``verify`` is the rule alone, on given logits.
Refinement step by step, the cache's slow twin, runs on the same states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specforge_dspine.bench_steps import SEED, Bench
from specforge_dspine.decoding import Drawing, candidates, never_emitted, stepwise, transition_cache, walk
from specforge_dspine.drafting import BlockDrafter
from specforge_dspine.sampling import Sampling
from specforge_dspine.verification import verify

NEW = 4  # context tokens that the round before accepted
SAMPLING = Sampling(temperature=1.0)
PIECES = ("backbone", "candidates", "cache", "walk", "verify")


@dataclass
class RoundPieces:
    """Seconds of the pieces of one round, sampled, and of ``stepwise``, which does what cache and walk do."""

    backbone: float = 0.0
    candidates: float = 0.0
    cache: float = 0.0
    walk: float = 0.0
    verify: float = 0.0
    stepwise: float = 0.0

    @property
    def whole(self) -> float:
        """Seconds of the round."""
        return sum(getattr(self, name) for name in PIECES)


class DecodingBench:
    """Rounds of ``bench``'s draft, each from the same context."""

    @torch.inference_mode()
    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.drafter = BlockDrafter(bench.model.draft_model, bench.head.weight, bench.embedding.weight)
        self.generator = torch.Generator(bench.device).manual_seed(SEED)
        self.taps = bench.batch.tensors["hidden_states"][0]
        self.anchor = torch.ones((), dtype=torch.long, device=bench.device)
        shape = (bench.sizes.block, bench.sizes.vocab)
        self.logits = torch.randn(shape, generator=self.generator, device=bench.device).to(bench.sizes.dtype)
        self.kept = len(self.taps) - NEW
        self.drafter.block(self.anchor, self.taps[: self.kept])

    @torch.inference_mode()
    def round_in_pieces(self) -> RoundPieces:
        """One round, each piece timed on its own."""
        bench, pieces, made = self.bench, RoundPieces(), {}
        draft, head, sizes = self.drafter.draft, self.drafter.head, bench.sizes
        self.drafter.context.crop(self.kept)

        def timed(name: str, work: Callable[[], Any]) -> Any:
            """What ``work`` makes; its seconds are the piece ``name``."""
            setattr(pieces, name, bench.timed(lambda: made.update({name: work()})))
            return made[name]

        out = timed("backbone", lambda: self.drafter.block(self.anchor, self.taps[self.kept :]))
        hidden, pre_injection = out.hidden[0, 0, 1:], out.pre_injection[0, 0, 1:]

        def best() -> Tensor:
            excluded = never_emitted(draft.settings, draft.mask_token_id, sizes.vocab, bench.device)
            return candidates(head, hidden, excluded, sizes.top_k)[0]

        ids = timed("candidates", best)
        scores = timed("cache", lambda: transition_cache(draft, head, pre_injection, ids, self.anchor))
        proposal = timed("walk", lambda: walk(scores, ids, SAMPLING, self.generator))
        timed("verify", lambda: verify(self.logits, proposal, SAMPLING, self.generator))
        wide = pre_injection.to(torch.promote_types(pre_injection.dtype, torch.float32))
        pick = Drawing(SAMPLING, self.generator)
        timed("stepwise", lambda: stepwise(draft, head, wide, ids, self.anchor, pick))
        return pieces
