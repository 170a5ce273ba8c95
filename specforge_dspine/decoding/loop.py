"""The speculative decoding loop: the draft proposes a block, the target verifies it in one forward (§6.4).

    prefill          the target reads the prompt and gives the first token, the first anchor
    anchor at a      the draft proposes M tokens from the target's features strictly below a
                     the target reads anchor and proposals: n of them are accepted, and it adds one token
                     the next anchor is that token, at a + n + 1; the features of a .. a + n are new context

The output is the target's own, whatever the draft: the same tokens (greedy), or tokens of the same distribution
(sampled).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specforge_dspine.decoding.drafter import BlockDrafter
from specforge_dspine.decoding.sampling import Sampling, choose
from specforge_dspine.decoding.verification import verify


class TargetOutput(NamedTuple):
    """The target's outputs at n tokens: ``logits`` [n, V] of the token after each, and features ``taps`` [n, T·H]."""

    logits: Tensor
    taps: Tensor


class Target(Protocol):
    """A target that verifies, one sequence at a time."""

    def start(self, prompt: Tensor) -> TargetOutput:
        """Read the prompt [P] of a new sequence; only the last row of its logits is needed ([1, V])."""

    def extend(self, tokens: Tensor) -> TargetOutput:
        """Read ``tokens`` [n] after what was kept so far."""

    def keep(self, count: int) -> None:
        """Keep the first ``count`` tokens of the last ``extend`` and forget the others."""


@dataclass(frozen=True)
class Round:
    """One round: the ``anchor``'s position in the sequence, M ``proposed`` ids, how many were ``accepted``."""

    anchor: int
    proposed: tuple[int, ...]
    accepted: int


@dataclass(frozen=True)
class Trace:
    """All rounds of one response: ``ids`` [S] of prompt and response, the response from position ``prompt`` on."""

    name: str
    ids: tuple[int, ...]
    prompt: int
    rounds: tuple[Round, ...]

    @property
    def response(self) -> tuple[int, ...]:
        """The response's ids."""
        return self.ids[self.prompt :]

    @property
    def tokens(self) -> int:
        """Response tokens that the rounds gave: all but the first, which the prefill gives."""
        return len(self.ids) - self.prompt - 1

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Trace:
        """The inverse of ``dataclasses.asdict``."""
        rounds = (Round(r["anchor"], tuple(r["proposed"]), r["accepted"]) for r in entry["rounds"])
        return cls(entry["name"], tuple(entry["ids"]), entry["prompt"], tuple(rounds))


@torch.inference_mode()
def decode(
    drafter: BlockDrafter,
    target: Target,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop: Collection[int],
    sampling: Sampling,
    generator: torch.Generator,
    name: str = "",
) -> Trace:
    """Decode a response to ``prompt`` (P ids), until one of the ``stop`` ids or ``max_new_tokens``, at least 1.

    ``generator`` lives on the device of the target's logits.
    """
    drafter.restart()
    output = target.start(torch.tensor(prompt, device=generator.device))
    anchor, taps = choose(output.logits[-1], sampling, generator)[0], output.taps
    ids, rounds = [*prompt, int(anchor)], []
    end = len(prompt) + max_new_tokens
    while len(ids) < end and ids[-1] not in stop:
        proposal = drafter.propose(anchor, taps, sampling, generator)
        output = target.extend(torch.cat([anchor[None], proposal.tokens]))
        verified = verify(output.logits, proposal, sampling, generator)
        accepted, anchor = int(verified.accepted), verified.next_token
        proposed = proposal.tokens.tolist()
        new = truncate([*proposed[:accepted], int(anchor)], stop, end - len(ids))
        rounds.append(Round(len(ids) - 1, tuple(proposed), min(accepted, len(new))))
        ids += new
        taps = output.taps[: accepted + 1]
        target.keep(accepted + 1)
    return Trace(name, tuple(ids), len(prompt), tuple(rounds))


def truncate(tokens: list[int], stop: Collection[int], limit: int) -> list[int]:
    """Returns ``tokens`` up to and with the first of ``stop``, and at most ``limit`` of them."""
    end = next((at for at, token in enumerate(tokens, 1) if token in stop), len(tokens))
    return tokens[: min(end, limit)]
