"""A round of decoding in pieces: backbone, candidates, transition cache, walk, the target's forward, verification.

Draft and target work on a context of one whole sequence, whose last few tokens are new to the draft, as they are
after every round. The target has random weights, for its time does not depend on them. ``stepwise``, the sequential
reference implementation of cache and walk, runs on the same states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specforge_dspine.bench.models import SEED, Bench, Sizes, draft_config
from specforge_dspine.bench.section import Plan, Section, medians
from specforge_dspine.decoding.drafter import BlockDrafter
from specforge_dspine.decoding.proposal import candidates, walk
from specforge_dspine.decoding.sampling import Sampling
from specforge_dspine.decoding.target_backends import ModelTarget
from specforge_dspine.decoding.transition_cache import refine_sequentially, transition_cache
from specforge_dspine.decoding.verification import verify

NEW = 4  # context tokens that the previous round accepted
SAMPLING = Sampling(temperature=1.0)
DRAFTING = ("backbone", "candidates", "cache", "walk")
PIECES = (*DRAFTING, "target", "verify")


def random_target(sizes: Sizes, device: torch.device) -> ModelTarget:
    """A target of these sizes."""
    config = draft_config(sizes, "sdpa")
    config.num_hidden_layers, config.layer_types = sizes.target_layers, ["full_attention"] * sizes.target_layers
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
    def round_in_pieces(self) -> dict[str, float]:
        """Seconds of the pieces of one sampled round, and of ``stepwise``."""
        bench, draft, head, seconds = self.bench, self.drafter.draft, self.drafter.head, {}
        self.drafter.context.crop(self.kept)

        def timed(name: str, work: Callable[[], Any]) -> Any:
            seconds[name], result = bench.timed(work)
            return result

        out = timed("backbone", lambda: self.drafter.block(self.anchor, self.taps[self.kept :]))
        hidden, pre_injection = out.hidden[0, 0, 1:], out.pre_injection[0, 0, 1:]
        ids, _ = timed("candidates", lambda: candidates(draft, head, hidden))
        scores = timed("cache", lambda: transition_cache(draft, head, pre_injection, ids, self.anchor))
        proposal = timed("walk", lambda: walk(scores, ids, SAMPLING, self.generator))
        read = torch.cat([self.anchor[None], proposal.tokens])
        target = timed("target", lambda: self.target.extend(read))
        self.target.keep(0)
        timed("verify", lambda: verify(target.logits, proposal, SAMPLING, self.generator))
        wide = pre_injection.to(torch.promote_types(pre_injection.dtype, torch.float32))
        sequential = (draft, head, wide, ids, self.anchor, SAMPLING, self.generator)
        timed("stepwise", lambda: refine_sequentially(*sequential))
        return seconds


def decoding_section(plan: Plan) -> Section:
    """A sampled round by its pieces, and the cache against refinement step by step; all in the same rounds."""
    section, bench = Section(), plan.bench
    training = bench.model.draft_model.training
    rounds: list[dict[str, float]] = []
    try:
        with bench.attention_backend("sdpa"):  # one block against a long context: no block mask to build
            decoding = DecodingBench(bench)
            for _ in range(plan.warmup):
                decoding.round_in_pieces()
            for _ in plan.turns(lambda: sum(rounds[-1].values())):
                rounds.append(decoding.round_in_pieces())
    finally:
        bench.model.draft_model.train(training)

    def total(names: tuple[str, ...]) -> list[float]:
        return [sum(each[name] for name in names) for each in rounds]

    middle = medians([each | {"round": whole} for each, whole in zip(rounds, total(PIECES), strict=True)])
    note = f"sampled, the target's forward included; context {bench.sizes.sequence}, {NEW} tokens of it new"
    section.add("round", middle["round"], "s", note)
    for name in PIECES:
        section.add_share(name, middle[name], middle["round"], "the round")
    compared = {
        "step by step ÷ cache and walk": (("stepwise",), ("cache", "walk")),
        "drafting ÷ target and verify": (DRAFTING, ("target", "verify")),
        "refinement (cache and walk) ÷ backbone": (("cache", "walk"), ("backbone",)),
    }
    for name, (above, below) in compared.items():
        ratios = [a / b for a, b in zip(total(above), total(below), strict=True)]
        section.add_ratios(name, ratios, f", {len(rounds)} rounds")
    section.raw = {"pieces": rounds}
    return section
