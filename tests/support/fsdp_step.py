"""One forward and backward under FSDP, as SpecForge wraps a model, on CPU ranks (run by torchrun).

Prints the loss on rank 0. SpecForge's backend leaves the device to CUDA; here it is named, the rest is the same.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from specforge.modeling.draft.dflash import Qwen3DFlashDecoderLayer
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from tests.support.drafts import make_batch, make_blocks, make_model


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = make_model(dtype=torch.bfloat16)
    table = model.draft_model.transfer_codes.clone()
    batch, blocks = make_batch(dtype=torch.bfloat16), make_blocks([[4, 6, 11], [5, 17]])
    plain = model(**batch, blocks=blocks, beta=0.3)
    wrapped = FSDP(
        model,
        use_orig_params=True,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.float32),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        ignored_modules=[model.lm_head, model.embed_tokens],
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={Qwen3DFlashDecoderLayer}
        ),
        device_id=torch.device("cpu"),
    )
    ahead = wrapped(**batch, blocks=blocks, beta=0.3, window_reduce=None)  # look-ahead, then replay
    assert torch.allclose(ahead[0], plain.parts["ce"][0], rtol=1e-4) and ahead[1] == plain.denominator
    loss = wrapped(**batch, blocks=blocks, beta=0.3, window_reduce=lambda _own: ahead)
    loss.numerator.backward()
    gradients = [p.grad for p in wrapped.parameters() if p.requires_grad and p.grad is not None]
    assert gradients and all(torch.isfinite(g).all() for g in gradients)
    assert torch.equal(wrapped.module.draft_model.transfer_codes, table)
    assert torch.allclose(loss.numerator, plain.numerator, rtol=1e-4), (loss.numerator, plain.numerator)
    if dist.get_rank() == 0:
        print(f"loss {float(loss.numerator):.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
