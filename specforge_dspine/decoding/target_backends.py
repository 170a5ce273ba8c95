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

from specforge_dspine.decoding.loop import TargetOutput
from specforge_dspine.streaming.client import SGLangClient
from specforge_dspine.streaming.record import RecordError, Sample, TargetIdentity, read_record

ROWS_AT_ONCE = 256  # of logits over the vocabulary
GREEDY_SLACK = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""How far below the best logit, relative to it, a server's greedy choice may lie: its sums round in another order."""


def answer_span(loss_mask: Tensor, name: str) -> tuple[int, int]:
    """Where the answer of a captured record lies: the one run of 1 in its mask [S], prompt before it.

    Raises:
        ValueError: there is no such run, or several.
    """
    edges = F.pad(loss_mask.ne(0).int(), (1, 1)).diff().nonzero().flatten().tolist()
    if len(edges) != 2 or edges[0] == 0:
        raise ValueError(
            f"{name}: its loss mask has {len(edges) // 2} runs, from the places {edges[::2]} on; a captured answer "
            "follows a prompt in one run. Evaluate such conversations as prompts=FILE"
        )
    return edges[0], edges[1]


def check_greedy(final: Tensor, head: Tensor, answer: Tensor, name: str) -> None:
    """A replay is only true of the target's own greedy ``answer`` [n]: each token's logit, of the states ``final``
    [n, H] before it, has to be the best but for rounding.

    Raises:
        ValueError: a token is not.
    """
    for at in range(0, len(answer), ROWS_AT_ONCE):
        part = slice(at, at + ROWS_AT_ONCE)
        logits = F.linear(final[part].to(head.dtype), head).float()
        best = logits.amax(dim=-1)
        below = best - logits.gather(-1, answer[part, None]).squeeze(-1)
        allowed = GREEDY_SLACK[head.dtype] * best.abs().clamp_min(1)
        if (below > allowed).any():
            worst = int((below - allowed).argmax())
            raise ValueError(
                f"{name}: token {at + worst} of the answer is not the target's greedy choice (its logit lies "
                f"{float(below[worst]):.3g} below the best): answers drawn at a temperature, or by somebody else, "
                "cannot be replayed. Evaluate their prompts=FILE, or capture the target's greedy answers"
            )


class ModelTarget:
    """A causal LM of transformers, whose layers ``layers`` are tapped; on its own device and in its own dtype."""

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        self.model, self.layers = model.eval(), layers
        self.cache = DynamicCache()
        self.length = 0

    def start(self, prompt: Tensor) -> TargetOutput:
        """See ``rounds.Target``."""
        self.cache, self.length = DynamicCache(), len(prompt)
        return self._read(prompt, 1)

    def extend(self, tokens: Tensor) -> TargetOutput:
        """See ``rounds.Target``."""
        return self._read(tokens, len(tokens))

    def keep(self, count: int) -> None:
        """See ``rounds.Target``."""
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
    """An SGLang server that passed ``client.prove``; ``head`` E [V, H] is the target's, wherever it computes."""

    def __init__(self, client: SGLangClient, identity: TargetIdentity, head: Tensor) -> None:
        self.client, self.identity, self.head = client, identity, head
        self.kept: list[int] = []
        self.read: list[int] = []

    def start(self, prompt: Tensor) -> TargetOutput:
        """See ``rounds.Target``."""
        self.kept = prompt.tolist()
        final, taps = self._capture(self.kept, len(self.kept))
        return TargetOutput(F.linear(final[-1:], self.head), taps)

    def extend(self, tokens: Tensor) -> TargetOutput:
        """See ``rounds.Target``."""
        self.read = tokens.tolist()
        final, taps = self._capture(self.kept + self.read, len(self.read))
        return TargetOutput(F.linear(final, self.head), taps)

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

    def start(self, prompt: Tensor) -> TargetOutput:
        """See ``rounds.Target``."""
        self.length = len(prompt)
        return TargetOutput(self._next(self.ids.new_tensor([self.length - 1])), self.taps[: self.length])

    def extend(self, tokens: Tensor) -> TargetOutput:
        """See ``rounds.Target``."""
        positions = torch.arange(self.length, self.length + len(tokens), device=self.ids.device)
        return TargetOutput(self._next(positions), self.taps[self.length : self.length + len(tokens)])

    def keep(self, count: int) -> None:
        """See ``rounds.Target``."""
        self.length += count

    def _next(self, positions: Tensor) -> Tensor:
        following = self.ids[(positions + 1).clamp(max=len(self.ids) - 1)]
        return F.one_hot(following, self.vocab).float()
