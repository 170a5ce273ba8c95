"""Verification of a capture server: the right plugin, the right target, the right states."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from specforge_dspine.streaming.protocol import PROTOCOL
from specforge_dspine.streaming.record import TargetIdentity
from specforge_dspine.utils.errors import RunError
from specforge_dspine.utils.versions import VERSION

HEAD_CHUNK = 16384
"""Rows of the LM head that are multiplied at a time: there is never a second float32 copy of it."""


class CaptureVerificationError(RunError):
    """The server's capture cannot be trusted; the message says what differs and what to do."""


def check_facts(url: str, facts: dict[str, Any], target: TargetIdentity) -> None:
    """Raise ``CaptureVerificationError`` unless the plugin has our protocol and version and serves ``target``."""
    for key, value in {"protocol": PROTOCOL, "version": VERSION}.items():
        if facts.get(key, value) != value:
            raise CaptureVerificationError(
                f"{url}: the plugin's {key} is {facts[key]!r}, ours is {value!r}; install specforge-dspine {VERSION} "
                "in the server's environment and restart it"
            )
    if "layers" not in facts:  # refused before the model was loaded
        return
    for field in fields(TargetIdentity):
        expected, served = getattr(target, field.name), facts[field.name]
        if field.name == "layers":
            served = tuple(served)
        if field.name == "model_path" and _same_path(expected, served):
            continue
        if expected != served:
            raise CaptureVerificationError(
                f"{url}: the server's {field.name} is {served!r}, this run needs {expected!r}; restart the server "
                "for this target and these layers, or correct the recipe"
            )


def check_head(url: str, lm_head: torch.Tensor, finals: torch.Tensor, tokens: list[int], dtype: torch.dtype) -> None:
    """Check that LM head × final state chooses the server's own greedy tokens, up to rounding.

    States from before the final norm pass every other check (TorchSpec#169).

    Args:
        url: of the server, for the message.
        lm_head: [V, H].
        finals: [P, H], the captured final state of the last token of each of P probes.
        tokens: P tokens that the server chose.
        dtype: of the server's logits.

    Raises:
        CaptureVerificationError: another token is better beyond rounding, or all probes are ties.
    """
    states = finals.float()
    chunks = lm_head.split(HEAD_CHUNK)
    logits = torch.cat([states @ part.float().T.to(states.device) for part in chunks], dim=-1)  # [P, V]
    top = logits.topk(2, dim=-1).values
    # The server rounds its logits to the model's dtype, so two within a few units are a tie.
    tolerance = (4 * torch.finfo(dtype).eps * top[:, 0].abs()).clamp(min=1e-3)
    for probe, token in enumerate(tokens):
        gap = float(top[probe, 0] - logits[probe, token])
        if gap > float(tolerance[probe]):
            raise CaptureVerificationError(
                f"{url}: the server chose token {token} after a probe, but LM head × captured final state prefers "
                f"{int(logits[probe].argmax())} by {gap:.3g}: the head is not this target's, or the states are not "
                "those after its final norm. Check the target's path and revision"
            )
    if not (top[:, 0] - top[:, 1] > tolerance).any():
        raise CaptureVerificationError(
            f"{url}: after all {len(tokens)} probes the two best tokens tie within rounding, which verifies nothing; "
            "use another probe prompt"
        )


def _same_path(a: str, b: str) -> bool:
    return Path(a).exists() and Path(b).exists() and Path(a).resolve() == Path(b).resolve()
