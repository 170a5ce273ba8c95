"""A round of decoding taken apart: backbone, candidates, transition cache, walk, the target's forward, its verdict.

Draft and target work on a context of one whole sequence, of which the last few tokens are new to the draft, as after
a round before. The target has random weights of its own, for its time does not depend on them. Refinement step by
step, the cache's slow twin, runs on the same states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from specforge_dspine.bench.models import SEED, Bench, Sizes
from specforge_dspine.decoding.candidates import candidates, excluded_mask
from specforge_dspine.decoding.drafter import BlockDrafter
from specforge_dspine.decoding.last_write_refinement import refine_sequentially
from specforge_dspine.decoding.proposal import propose_by_walk
from specforge_dspine.decoding.sampling import Sampling
from specforge_dspine.decoding.target_backends import ModelTarget
from specforge_dspine.decoding.transition_cache import transition_cache
from specforge_dspine.decoding.verification import verify

NEW = 4  # context tokens that the round before accepted
SAMPLING = Sampling(temperature=1.0)
DRAFTING = ("backbone", "candidates", "cache", "walk")
PIECES = (*DRAFTING, "target", "verify")


@dataclass
class RoundPieces:
    """Seconds of the pieces of one round, sampled, and of ``stepwise``, which does what cache and walk do."""

    backbone: float = 0.0
    candidates: float = 0.0
    cache: float = 0.0
    walk: float = 0.0
    target: float = 0.0
    verify: float = 0.0
    stepwise: float = 0.0

    @property
    def whole(self) -> float:
        """Seconds of the round."""
        return sum(getattr(self, name) for name in PIECES)

    @property
    def drafting(self) -> float:
        """Seconds of what the draft does in it."""
        return sum(getattr(self, name) for name in DRAFTING)


def random_target(sizes: Sizes, device: torch.device) -> ModelTarget:
    """A target of these sizes."""
    config = Qwen3Config(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.target_layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.intermediate,
        max_position_embeddings=2 * sizes.sequence,
    )
    with torch.device(device):
        return ModelTarget(AutoModelForCausalLM.from_config(config, dtype=sizes.dtype), range(sizes.taps))


class DecodingBench:
    """Rounds of ``bench``'s draft, each from the same context."""

    @torch.inference_mode()
    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.drafter = BlockDrafter(bench.model.draft_model, bench.head.weight, bench.embedding.weight)
        self.generator = torch.Generator(bench.device).manual_seed(SEED)
        self.taps = bench.batch.tensors["hidden_states"][0]
        self.anchor = torch.ones((), dtype=torch.long, device=bench.device)
        self.kept = len(self.taps) - NEW
        self.drafter.block(self.anchor, self.taps[: self.kept])
        self.target = random_target(bench.sizes, bench.device)
        self.target.start(bench.batch.tensors["input_ids"][0].to(bench.device))

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
            excluded = excluded_mask(draft.settings, draft.mask_token_id, sizes.vocab, bench.device)
            return candidates(head, hidden, excluded, sizes.top_k)[0]

        ids = timed("candidates", best)
        scores = timed("cache", lambda: transition_cache(draft, head, pre_injection, ids, self.anchor))
        proposal = timed("walk", lambda: propose_by_walk(scores, ids, SAMPLING, self.generator))
        read = torch.cat([self.anchor[None], proposal.tokens])
        seen = timed("target", lambda: self.target.extend(read))
        self.target.keep(0)
        timed("verify", lambda: verify(seen.logits, proposal, SAMPLING, self.generator))
        wide = pre_injection.to(torch.promote_types(pre_injection.dtype, torch.float32))
        sequential = (draft, head, wide, ids, self.anchor, SAMPLING, self.generator)
        timed("stepwise", lambda: refine_sequentially(*sequential))
        return pieces
