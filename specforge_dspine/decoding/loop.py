"""Speculative decoding, round by round: the draft proposes a block, the target verifies it in one forward (§6.4).

    prefill          the target reads the prompt and gives the first token, the first anchor
    anchor at a      the draft proposes M tokens from the target's states strictly below a
                     the target reads anchor and proposals: n of them are accepted, and it adds one token
                     the next anchor is that token, at a + n + 1; the states of a .. a + n are new context

What comes out is what the target alone would have said, whatever the draft: the same tokens (greedy), or tokens of
the same distribution (sampled).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specforge_dspine.decoding.proposal import Proposal
from specforge_dspine.decoding.sampling import Sampling, choose
from specforge_dspine.decoding.verification import verify


class TargetOutput(NamedTuple):
    """What the target says of n tokens that it read: ``logits`` [n, V] of the token after each, and the tapped
    layers' outputs ``taps`` [n, T·H]."""

    logits: Tensor
    taps: Tensor


class Target(Protocol):
    """A target that verifies, one sequence at a time."""

    def start(self, prompt: Tensor) -> TargetOutput:
        """Read the prompt [P] of a new sequence; of its logits only the last row is needed ([1, V])."""
        ...

    def extend(self, tokens: Tensor) -> TargetOutput:
        """Read ``tokens`` [n] after what was kept so far."""
        ...

    def keep(self, count: int) -> None:
        """Keep the first ``count`` tokens of the last ``extend`` and forget the others."""
        ...


class Drafter(Protocol):
    """Whatever proposes; ``drafting.BlockDrafter`` is ours."""

    def restart(self) -> None:
        """A new sequence begins."""
        ...

    def propose(self, anchor: Tensor, taps: Tensor, sampling: Sampling, generator: torch.Generator) -> Proposal:
        """Tokens [M] after ``anchor`` [], given the states ``taps`` [n, T·H] of the n newest tokens below it."""
        ...


@dataclass(frozen=True)
class Round:
    """One round of drafting: ``anchor`` position in the sequence, M ``proposed`` ids, how many were ``accepted``."""

    anchor: int
    proposed: tuple[int, ...]
    accepted: int


@dataclass(frozen=True)
class Trace:
    """All rounds of one answer: ``ids`` [S] prompt and answer, the answer starting at ``prompt``."""

    name: str
    ids: tuple[int, ...]
    prompt: int
    rounds: tuple[Round, ...]

    @property
    def answer(self) -> tuple[int, ...]:
        """The answer's ids."""
        return self.ids[self.prompt :]

    @property
    def tokens(self) -> int:
        """Answer tokens that the rounds yielded: all but the first, which the prefill gives."""
        return len(self.ids) - self.prompt - 1

    def to_json(self) -> dict[str, Any]:
        """As files hold it."""
        return asdict(self)

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Trace:
        """The inverse of ``to_json``."""
        rounds = (Round(r["anchor"], tuple(r["proposed"]), r["accepted"]) for r in entry["rounds"])
        return cls(entry["name"], tuple(entry["ids"]), entry["prompt"], tuple(rounds))


@torch.inference_mode()
def decode(
    drafter: Drafter,
    target: Target,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop: Collection[int],
    sampling: Sampling,
    generator: torch.Generator,
    name: str = "",
) -> Trace:
    """Answer ``prompt`` (P ids) until one of the ``stop`` ids or ``max_new_tokens``, at least 1.

    ``generator`` lives on the device of the target's logits.
    """
    drafter.restart()
    seen = target.start(torch.tensor(prompt, device=generator.device))
    anchor, taps = choose(seen.logits[-1], sampling, generator), seen.taps
    ids, rounds = [*prompt, int(anchor)], []
    end = len(prompt) + max_new_tokens
    while len(ids) < end and ids[-1] not in stop:
        proposal = drafter.propose(anchor, taps, sampling, generator)
        seen = target.extend(torch.cat([anchor[None], proposal.tokens]))
        verdict = verify(seen.logits, proposal, sampling, generator)
        accepted, anchor = int(verdict.accepted), verdict.token
        proposed = proposal.tokens.tolist()
        new = cut([*proposed[:accepted], int(anchor)], stop, end - len(ids))
        rounds.append(Round(len(ids) - 1, tuple(proposed), min(accepted, len(new))))
        ids += new
        taps = seen.taps[: accepted + 1]
        target.keep(accepted + 1)
    return Trace(name, tuple(ids), len(prompt), tuple(rounds))


def cut(tokens: list[int], stop: Collection[int], room: int) -> list[int]:
    """``tokens`` up to the first of ``stop``, itself included, and ``room`` of them at most."""
    end = next((at for at, token in enumerate(tokens, 1) if token in stop), len(tokens))
    return tokens[: min(end, room)]
