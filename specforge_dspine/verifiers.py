"""The targets that verify (``rounds.Target``): a model in this process, an SGLang server, or a known answer.

``ModelTarget`` keeps keys and values: a round costs anchor and proposals. ``ServedTarget`` captures prefix and block
anew in every round, through our plugin: the server's states, with the target's LM head on the final one.
``CapturedAnswer`` replays: greedy verification accepts exactly the target's greedy answer, so that with this answer
and the states over it every round is known without running the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from specforge_dspine.rounds import Seen
from specforge_dspine.stream.client import SGLangClient
from specforge_dspine.stream.record import RecordError, Sample, TargetIdentity, read_record


class ModelTarget:
    """A causal LM of transformers, whose layers ``layers`` are tapped; on its own device and in its own dtype."""

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        self.model, self.layers = model.eval(), layers
        self.cache = DynamicCache()
        self.length = 0

    def start(self, prompt: Tensor) -> Seen:
        """See ``rounds.Target``."""
        self.cache, self.length = DynamicCache(), len(prompt)
        return self._read(prompt, 1)

    def extend(self, tokens: Tensor) -> Seen:
        """See ``rounds.Target``."""
        return self._read(tokens, len(tokens))

    def keep(self, count: int) -> None:
        """See ``rounds.Target``."""
        self.length += count
        self.cache.crop(self.length)

    def _read(self, tokens: Tensor, logits: int) -> Seen:
        out = self.model(
            tokens[None],
            past_key_values=self.cache,
            use_cache=True,
            output_hidden_states=True,
            logits_to_keep=logits,
        )
        taps = torch.cat([out.hidden_states[layer + 1][0] for layer in self.layers], dim=-1)
        return Seen(out.logits[0], taps)


class ServedTarget:
    """An SGLang server that passed ``client.prove``; ``head`` E [V, H] is the target's, wherever it computes."""

    def __init__(self, client: SGLangClient, identity: TargetIdentity, head: Tensor) -> None:
        self.client, self.identity, self.head = client, identity, head
        self.kept: list[int] = []
        self.read: list[int] = []

    def start(self, prompt: Tensor) -> Seen:
        """See ``rounds.Target``."""
        self.kept = prompt.tolist()
        final, taps = self._capture(self.kept, len(self.kept))
        return Seen(F.linear(final[-1:], self.head), taps)

    def extend(self, tokens: Tensor) -> Seen:
        """See ``rounds.Target``."""
        self.read = tokens.tolist()
        final, taps = self._capture(self.kept + self.read, len(self.read))
        return Seen(F.linear(final, self.head), taps)

    def keep(self, count: int) -> None:
        """See ``rounds.Target``."""
        self.kept += self.read[:count]

    def _capture(self, ids: list[int], last: int) -> tuple[Tensor, Tensor]:
        """Final and tapped states of the ``last`` tokens of ``ids``.

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


class CapturedAnswer:
    """The target's greedy answer, ``ids`` [S] with the prompt, and its tapped states over them, ``taps`` [S, T·H].

    For greedy decoding of that prompt, up to the answer's length: the logits [n, V] only say which token comes next,
    and what they say after a wrong proposal is never read.
    """

    def __init__(self, ids: Tensor, taps: Tensor, vocab: int) -> None:
        self.ids, self.taps, self.vocab = ids, taps, vocab
        self.length = 0

    def start(self, prompt: Tensor) -> Seen:
        """See ``rounds.Target``."""
        self.length = len(prompt)
        return Seen(self._next(self.ids.new_tensor([self.length - 1])), self.taps[: self.length])

    def extend(self, tokens: Tensor) -> Seen:
        """See ``rounds.Target``."""
        positions = torch.arange(self.length, self.length + len(tokens), device=self.ids.device)
        return Seen(self._next(positions), self.taps[self.length : self.length + len(tokens)])

    def keep(self, count: int) -> None:
        """See ``rounds.Target``."""
        self.length += count

    def _next(self, positions: Tensor) -> Tensor:
        following = self.ids[(positions + 1).clamp(max=len(self.ids) - 1)]
        return F.one_hot(following, self.vocab).float()
