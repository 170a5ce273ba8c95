"""Targets that verify (``loop.Target``): a model in this process, an SGLang server, or a captured response.

``ModelTarget`` keeps keys and values: a round computes anchor and proposals. ``ServedTarget`` captures prefix and
block again in every round, through our plugin; the target's LM head runs here on the server's final states.
``CapturedResponse`` replays: greedy verification accepts exactly the target's greedy response. With that response and
its features every round is known without running the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from specforge_dspine.decoding.loop import TargetOutput
from specforge_dspine.streaming.client import SGLangClient
from specforge_dspine.streaming.record import RecordError, Sample, TargetIdentity, read_record

POSITIONS_PER_CHUNK = 256  # of logits over the vocabulary
GREEDY_SLACK = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""How far below the best logit, relative to it, a server's greedy choice may lie: its sums round in another order."""


def response_span(loss_mask: Tensor, name: str) -> tuple[int, int]:
    """Returns where a captured record's response begins and ends: the one run of 1 in its mask [S].

    Raises:
        ValueError: the mask has no run, several, or one without a prompt before it.
    """
    edges = F.pad(loss_mask.ne(0).int(), (1, 1)).diff().nonzero().flatten().tolist()
    if len(edges) != 2 or edges[0] == 0:
        raise ValueError(
            f"{name}: its loss mask has {len(edges) // 2} runs, from the positions {edges[::2]} on; a captured "
            "response follows a prompt in one run. Evaluate such conversations as prompts=FILE"
        )
    return edges[0], edges[1]


def check_greedy(final: Tensor, head: Tensor, response: Tensor, name: str) -> None:
    """Check that ``response`` [n] is the target's greedy one; only such a response can be replayed.

    Args:
        final: the target's final states [n, H] before each token.
        head: E [V, H].
        name: of the record, for the message.

    Raises:
        ValueError: a token's logit is not the best, by more than rounding.
    """
    for at in range(0, len(response), POSITIONS_PER_CHUNK):
        part = slice(at, at + POSITIONS_PER_CHUNK)
        logits = F.linear(final[part].to(head.dtype), head).float()
        best = logits.amax(dim=-1)
        below = best - logits.gather(-1, response[part, None]).squeeze(-1)
        allowed = GREEDY_SLACK[head.dtype] * best.abs().clamp_min(1)
        if (below > allowed).any():
            worst = int((below - allowed).argmax())
            raise ValueError(
                f"{name}: token {at + worst} of the response is not the target's greedy choice (its logit lies "
                f"{float(below[worst]):.3g} below the best), so it cannot be replayed. Evaluate its prompt as "
                "prompts=FILE, or capture the target's greedy responses"
            )


class ModelTarget:
    """A causal LM of transformers, with ``layers`` tapped, on its own device and in its own dtype."""

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        self.model, self.layers = model.eval(), layers
        self.cache = DynamicCache()
        self.length = 0

    def start(self, prompt: Tensor) -> TargetOutput:
        """See ``loop.Target``."""
        self.cache, self.length = DynamicCache(), len(prompt)
        return self._read(prompt, 1)

    def extend(self, tokens: Tensor) -> TargetOutput:
        """See ``loop.Target``."""
        return self._read(tokens, len(tokens))

    def keep(self, count: int) -> None:
        """See ``loop.Target``."""
        self.length += count
        self.cache.crop(self.length)

    def _read(self, tokens: Tensor, logits: int) -> TargetOutput:
        out = self.model(
            tokens[None],
            past_key_values=self.cache,
            use_cache=True,
            output_hidden_states=True,
            logits_to_keep=logits,
        )
        taps = torch.cat([out.hidden_states[layer + 1][0] for layer in self.layers], dim=-1)
        return TargetOutput(out.logits[0], taps)


class ServedTarget:
    """An SGLang server that passed ``client.verify_server``; ``head`` E [V, H] is the target's, in this process."""

    def __init__(self, client: SGLangClient, identity: TargetIdentity, head: Tensor) -> None:
        self.client, self.identity, self.head = client, identity, head
        self.kept: list[int] = []
        self.read: list[int] = []

    def start(self, prompt: Tensor) -> TargetOutput:
        """See ``loop.Target``."""
        self.kept = prompt.tolist()
        final, taps = self._capture(self.kept, len(self.kept))
        return TargetOutput(F.linear(final[-1:], self.head), taps)

    def extend(self, tokens: Tensor) -> TargetOutput:
        """See ``loop.Target``."""
        self.read = tokens.tolist()
        final, taps = self._capture(self.kept + self.read, len(self.read))
        return TargetOutput(F.linear(final, self.head), taps)

    def keep(self, count: int) -> None:
        """See ``loop.Target``."""
        self.kept += self.read[:count]

    def _capture(self, ids: list[int], last: int) -> tuple[Tensor, Tensor]:
        """Capture the final states [last, H] and features [last, T·H] of the ``last`` tokens of ``ids``.

        Raises:
            RecordError: the server could not capture them.
        """
        record = self.client.capture([Sample("round", ids, [1] * len(ids))], self.identity)[0]
        if isinstance(record, RecordError):
            raise record
        try:
            tensors = read_record(record)
        finally:
            record.unlink()
        names = ("target_last_hidden_states", "hidden_states")
        final, taps = (tensors[name][0, -last:].to(self.head.device) for name in names)
        return final, taps


class CapturedResponse:
    """The target's greedy response, for decoding just that: ``ids`` [S] with the prompt, features ``taps`` [S, T·H].

    The logits [n, V] only give the token that comes next; those after a wrong proposal are never read.
    """

    def __init__(self, ids: Tensor, taps: Tensor, vocab: int) -> None:
        self.ids, self.taps, self.vocab = ids, taps, vocab
        self.length = 0

    def start(self, prompt: Tensor) -> TargetOutput:
        """See ``loop.Target``."""
        self.length = len(prompt)
        return TargetOutput(self._next(self.ids.new_tensor([self.length - 1])), self.taps[: self.length])

    def extend(self, tokens: Tensor) -> TargetOutput:
        """See ``loop.Target``."""
        positions = torch.arange(self.length, self.length + len(tokens), device=self.ids.device)
        return TargetOutput(self._next(positions), self.taps[self.length : self.length + len(tokens)])

    def keep(self, count: int) -> None:
        """See ``loop.Target``."""
        self.length += count

    def _next(self, positions: Tensor) -> Tensor:
        following = self.ids[(positions + 1).clamp(max=len(self.ids) - 1)]
        return F.one_hot(following, self.vocab).float()
