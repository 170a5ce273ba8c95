"""Targets that verify (``loop.Target``): a model in this process, or an SGLang server.

``ModelTarget`` keeps keys and values: a round computes anchor and proposals. ``ServedTarget`` captures prefix and
block again in every round, through our plugin; the target's LM head runs here on the server's final states.
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


class ModelTarget:
    """A causal LM of transformers, with ``layers`` tapped, on its own device and in its own dtype."""

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        self.model, self.layers = model.eval(), layers
        self.cache = DynamicCache()
        self.length = 0

    def start(self, prompt: Tensor) -> TargetOutput:
        self.cache, self.length = DynamicCache(), len(prompt)
        return self._read(prompt, 1)

    def extend(self, tokens: Tensor) -> TargetOutput:
        return self._read(tokens, len(tokens))

    def keep(self, count: int) -> None:
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
        self.kept = prompt.tolist()
        final, taps = self._capture(self.kept, len(self.kept))
        return TargetOutput(F.linear(final[-1:], self.head), taps)

    def extend(self, tokens: Tensor) -> TargetOutput:
        self.read = tokens.tolist()
        final, taps = self._capture(self.kept + self.read, len(self.read))
        return TargetOutput(F.linear(final, self.head), taps)

    def keep(self, count: int) -> None:
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
