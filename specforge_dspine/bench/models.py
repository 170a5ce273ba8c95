"""Models of the benchmark: one backbone with DSpine's training step, and with those of SpecForge's DFlash and DSpark.

All get the same sizes, backbone weights, head, embedding, random features and number of anchors. Their steps go
through their own training strategies: forward, objective, backward, no optimizer.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.base import DraftTrainStrategy, StepContext
from torch import nn
from transformers import Qwen3Config

from specforge_dspine.modeling.draft_config import small_draft_config
from specforge_dspine.modeling.draft_model import DSpineDraftModel
from specforge_dspine.modeling.injection import AdjacentCausalInjection
from specforge_dspine.modeling.settings import DSpineSettings
from specforge_dspine.modeling.transfer_space import build_transfer_space
from specforge_dspine.objective.alignment_gate import alignment_beta
from specforge_dspine.objective.curriculum import draw_blocks
from specforge_dspine.objective.training_model import DSpineTrainingModel
from specforge_dspine.training.strategy import FEATURES, DSpineTrainStrategy

Result = TypeVar("Result")
SEED = 0
PLAIN, HEADS = "DSpark", "DSpark with heads"  # without and with its Markov and confidence heads
MARKOV_RANK = 256
# Early in the run, where half of all blocks get right predecessors, so that the step includes the curriculum's cost.
CONTEXT = StepContext(global_step=1, total_steps=100)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a micro-batch of one sequence; ``chunk_blocks`` 0: all logits at once."""

    sequence: int  # S
    anchors: int  # N
    block: int  # B
    layers: int  # L
    taps: int  # T
    target_layers: int
    hidden: int  # H
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int  # V
    rank: int  # r
    message: int  # a
    top_k: int  # K
    chunk_blocks: int
    dtype: torch.dtype


# fmt: off
SIZES = {
    # SmolLM2-135M's shape, as recipes/smollm2_cpu.yaml trains it.
    "small": Sizes(sequence=256, anchors=48, block=8, layers=2, taps=5, target_layers=30, hidden=576,
                   intermediate=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152, rank=256, message=128, top_k=16,
                   chunk_blocks=0, dtype=torch.float32),
    # As recipes/qwen3_8b.yaml.
    "qwen3_8b": Sizes(sequence=3072, anchors=512, block=16, layers=5, taps=5, target_layers=36, hidden=4096,
                      intermediate=12288, heads=32, kv_heads=8, head_dim=128, vocab=151936, rank=1024, message=512,
                      top_k=16, chunk_blocks=128, dtype=torch.bfloat16),
    # For dry runs: no two sizes are equal, so that a tensor's shape identifies it.
    "toy": Sizes(sequence=200, anchors=64, block=5, layers=2, taps=3, target_layers=7, hidden=48, intermediate=80,
                 heads=4, kv_heads=2, head_dim=16, vocab=3000, rank=24, message=12, top_k=6, chunk_blocks=16,
                 dtype=torch.float32),
}
# fmt: on


def draft_config(sizes: Sizes, attention: str) -> Qwen3Config:
    """DSpine's draft config of these sizes; ``attention``: sdpa or flex_attention."""
    settings = DSpineSettings(
        transfer_rank=sizes.rank,
        message_size=sizes.message,
        top_k=sizes.top_k,
        replacement_layers=(sizes.layers + 1) // 2,
    )
    config = small_draft_config(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.intermediate,
        rms_norm_eps=1e-6,
        theta=1e6,
        block_size=sizes.block,
        target_layer_ids=range(sizes.taps),
        num_target_layers=sizes.target_layers,
        mask_token_id=sizes.vocab - 1,
        settings=settings,
    )
    config._attn_implementation = attention
    return config


def make_batch(sizes: Sizes, device: torch.device) -> TrainBatch:
    """Random ids and states, the latter on ``device``; the first eighth of the sequence is a prompt."""
    mask = torch.ones(1, sizes.sequence, dtype=torch.long)
    mask[:, : sizes.sequence // 8] = 0
    shape = (1, sizes.sequence)
    tensors = {
        "input_ids": torch.randint(0, sizes.vocab - 1, shape),
        "loss_mask": mask,
        "hidden_states": torch.randn(*shape, sizes.taps * sizes.hidden, dtype=sizes.dtype, device=device),
        "target_last_hidden_states": torch.randn(*shape, sizes.hidden, dtype=sizes.dtype, device=device),
    }
    return TrainBatch(sample_ids=["random"], strategy="dspine", tensors=tensors)


class Bench:
    """The models of ``sizes`` on ``device``; all share head, embedding and backbone weights."""

    def __init__(self, sizes: Sizes, device: torch.device, attention: str) -> None:
        self.sizes, self.device, self.attention = sizes, device, attention
        torch.manual_seed(SEED)
        with torch.device(device):
            # Post-norm states have unit scale; 2 / √H gives logits of spread 2.
            self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False, dtype=sizes.dtype)
            nn.init.normal_(self.head.weight, std=2 / sizes.hidden**0.5)
            self.embedding = nn.Embedding(sizes.vocab, sizes.hidden, dtype=sizes.dtype)
        self.head.requires_grad_(False)
        self.embedding.requires_grad_(False)
        self.batch = make_batch(sizes, device)
        self.common: dict[str, Any] = {  # of every training model
            "attention_backend": attention,
            "num_anchors": sizes.anchors,
            "loss_decay_gamma": 7.0,
            "objective_chunk_blocks": sizes.chunk_blocks,
        }
        with torch.device(device):
            draft = DSpineDraftModel(draft_config(sizes, attention))
        draft = draft.to(device, sizes.dtype)
        self.model = DSpineTrainingModel(
            draft, self.head, self.embedding, normalization="separate", **self.common
        ).train()

    def build_transfer_space(self) -> None:
        """Build the head's transfer space for the draft, and give W, which starts at 0, values as after training."""
        draft = self.model.draft_model
        draft.set_transfer_space(build_transfer_space(self.head.weight, self.sizes.rank))
        with torch.no_grad():
            for write in cast(AdjacentCausalInjection, draft.injection).writes:
                nn.init.normal_(write.get_parameter("weight"), std=0.01)

    def strategy(self) -> DraftTrainStrategy:
        """DSpine's training strategy."""
        return DSpineTrainStrategy(self.model, seed=SEED, warmup_ratio=0.0)

    def host_strategies(self) -> dict[str, DraftTrainStrategy]:
        """SpecForge's own training strategies, by name; an ImportError if their requirements are not installed."""
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel, OnlineDSparkModel
        from specforge.modeling.draft.dflash import DFlashDraftModel
        from specforge.modeling.draft.dspark import DSparkDraftModel
        from specforge.training.strategies.base import DFlashTrainStrategy, DSparkTrainStrategy

        heads = {"markov_rank": MARKOV_RANK, "confidence_head_alpha": 1.0, "confidence_head_with_markov": True}
        return {
            "DFlash": DFlashTrainStrategy(self._host(OnlineDFlashModel, DFlashDraftModel, {})),
            PLAIN: DSparkTrainStrategy(self._host(OnlineDSparkModel, DSparkDraftModel, {})),
            HEADS: DSparkTrainStrategy(self._host(OnlineDSparkModel, DSparkDraftModel, heads)),
        }

    def _host(self, training_model: Any, draft_model: Any, options: dict[str, Any]) -> nn.Module:
        """A training model of SpecForge's on DSpine's backbone, with its defaults, our chunks and our decay."""
        sizes = self.sizes
        config = copy.deepcopy(draft_config(sizes, self.attention))
        mode = "mha" if sizes.heads == sizes.kv_heads else "gqa"
        config.dflash_config = {**config.dflash_config, "causal": False, "attention_mode": mode, **options}
        with torch.device(self.device):
            draft = draft_model(config)
        draft = draft.to(self.device, sizes.dtype)
        ours, theirs = self.model.draft_model.state_dict(), draft.state_dict()
        draft.load_state_dict({name: ours[name] for name in theirs.keys() & ours.keys()}, strict=False)
        model: nn.Module = training_model(
            draft_model=draft,
            target_lm_head=self.head,
            target_embed_tokens=self.embedding,
            mask_token_id=sizes.vocab - 1,
            block_size=sizes.block,
            **self.common,
        )
        return model.train()

    @contextmanager
    def attention_backend(self, backend: str) -> Iterator[None]:
        """Give DSpine's draft another attention for a while."""
        config, before = self.model.draft_model.config, self.model.attention_backend
        self.model.attention_backend = config._attn_implementation = backend
        try:
            yield
        finally:
            self.model.attention_backend = config._attn_implementation = before

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, work: Callable[[], Result]) -> tuple[float, Result]:
        """Seconds that ``work`` takes, the device's included, and its result."""
        self.wait()
        start = time.perf_counter()
        result = work()
        self.wait()
        return time.perf_counter() - start, result

    def step_seconds(self, strategy: DraftTrainStrategy) -> tuple[float, float]:
        """Seconds and CPU seconds of one step of ``strategy``: forward, objective, backward."""
        strategy.trainable_module().zero_grad(set_to_none=True)

        def step() -> None:
            out = strategy.forward_loss(self.batch, CONTEXT)
            loss = out.loss_terms[0] if out.loss_terms is not None else out.loss
            loss.backward()  # type: ignore[no-untyped-call]

        before = time.process_time()
        seconds, _ = self.timed(step)
        return seconds, time.process_time() - before

    def inputs(self) -> dict[str, Any]:
        """The arguments that DSpine's strategy passes to its model for this batch."""
        settings = self.model.draft_model.settings
        mask, chance = self.batch.tensors["loss_mask"], settings.replacement_probability
        anchors = self.model.num_anchors
        blocks = draw_blocks(mask, self.batch.sample_ids, seed=SEED, num_anchors=anchors, probability=chance)
        tensors: dict[str, Any] = {name: self.batch.tensors[name].to(self.device) for name in FEATURES}
        beta = alignment_beta(CONTEXT.global_step, 0, settings)
        return tensors | {"blocks": blocks.to(self.device), "beta": beta}
