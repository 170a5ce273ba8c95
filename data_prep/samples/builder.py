"""Training samples of responses: S token ids, and a loss mask that is 1 on exactly what the target wrote.

A response of the target comes with its ids, sent and returned, and they are taken as they are. Its end token is
supervised because it was emitted. A response of the data set is rendered (``rendering``) and encoded in two parts, as
a server reads the one and writes the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from data_prep.cleaning.conversations import read_conversation
from data_prep.pipeline.rows import Results, errors_as_invalid_row, hash_64, map_rows, row_id, row_name
from data_prep.readers.chunks import Chunk
from data_prep.samples.rendering import render_response
from data_prep.samples.statistics import TargetVocabulary
from specforge_dspine.utils.chat_template import THINKING, Message
from specforge_dspine.utils.cli import Options, option
from specforge_dspine.utils.errors import InvalidRow
from specforge_dspine.utils.files import to_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_SUPERVISED = 2  # an anchor and the token behind it
FINISHES = ("stop", "length", None)  # how a response ended: by itself, at a limit, unknown
DATASET = "dataset"  # origin of responses that the target did not write


class SampleSettings(Options):
    """How samples are built."""

    max_length: int = option("tokens of a sample; default: the target's context", default=0, ge=0, metavar="N")
    mask_token_id: int | None = option("reserved id; default: as training finds it", default=None, ge=0, metavar="ID")
    use_dataset_responses: bool = option("take chats with the responses that the data set has", default=False)
    thinking: Literal["none", "off", "on"] | None = option(
        "the template's switch, for these (default none)", default=None
    )


@dataclass(frozen=True)
class Target:
    """The target in the folder ``path``, and the size V of its vocabulary."""

    path: Path
    fingerprint: str
    vocab_size: int


@dataclass(frozen=True)
class SampleLine:
    """A sample as a line of output, and whether the maximum length cut it."""

    text: bytes
    was_cut: bool


def prepare_building(settings: SampleSettings, target: Target) -> Callable[[Chunk], Results[SampleLine]]:
    """The function for workers: what became of each response of a chunk."""
    from transformers import AutoTokenizer

    builder = SampleBuilder(settings, target, AutoTokenizer.from_pretrained(target.path))

    def lines(source: str, entry: Any) -> Iterator[SampleLine | InvalidRow]:
        for sample in builder.samples(source, entry):
            yield sample if isinstance(sample, InvalidRow) else SampleLine(to_line(sample), "cut" in sample)

    return lambda chunk: map_rows(chunk, lambda _, entry: lines(chunk.source, entry))


class SampleBuilder:
    """Builds samples for one target; a response that does not fit the maximum length loses its end, marked."""

    def __init__(self, settings: SampleSettings, target: Target, tokenizer: PreTrainedTokenizerBase) -> None:
        self._settings, self._target, self._tokenizer = settings, target, tokenizer
        self._vocabulary = TargetVocabulary.of(target.path, tokenizer, target.vocab_size, settings.mask_token_id)
        self._ends = [str(tokenizer.convert_ids_to_tokens(token)) for token in sorted(self._vocabulary.end_ids)]

    def samples(self, source: str, entry: Any) -> Iterator[dict[str, Any] | InvalidRow]:
        """A sample for every response in ``entry``, or why it gives none.

        Raises:
            InvalidRow: there is no response in it.
        """
        if isinstance(entry, dict) and {"prompt_ids", "output_ids"} <= entry.keys():
            yield self._of_record(source, entry)
            return
        messages = read_conversation(entry)
        if not self._settings.use_dataset_responses:
            advice = "run data_prep.regenerate, or give --use-dataset-responses"
            raise InvalidRow("not a response of the target", advice)
        responses = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        if not responses:
            raise InvalidRow("no response", "the conversation has only its prompt")
        name = row_name(source, entry, messages)
        cut_last = str(entry.get("finish_reason", entry.get("finish"))) == "length"
        for turn, at in enumerate(responses):
            was_cut = cut_last and at == len(messages) - 1
            try:  # one response that cannot be used does not cost those behind it
                with errors_as_invalid_row():
                    sample = self._of_rendered(f"{name}.{turn}", source, messages[: at + 1], was_cut=was_cut)
            except InvalidRow as error:
                yield error
            else:
                yield sample

    def _of_record(self, source: str, record: dict[str, Any]) -> dict[str, Any]:
        lists = [record["prompt_ids"], record["output_ids"]]
        if not all(isinstance(ids, list) and all(type(token) is int for token in ids) for ids in lists):
            raise InvalidRow("ids are not lists of integers", "prompt_ids, output_ids")
        target, finish = record.get("target"), record.get("finish")
        if target != self._target.fingerprint:
            raise InvalidRow("a response of another target", f"{target!r}, not {self._target.fingerprint!r}")
        if finish not in FINISHES:
            raise InvalidRow("unknown finish", f"{finish!r}: stop or length, or none if nobody knows")
        ends = [at for at, token in enumerate(lists[1]) if token in self._vocabulary.end_ids]
        if ends and set(lists[1][ends[0] + 1 :]) - {self._vocabulary.pad_id}:
            raise InvalidRow("an end token inside of the response", f"at place {ends[0]} of {len(lists[1])} ids")
        name, origin = record.get("id"), record.get("source")
        return self._sample(
            name if isinstance(name, str) and name else row_id(source, hash_64(str(lists))),
            origin if isinstance(origin, str) else source,
            *lists,
            origin=target,
            finish=finish,
        )

    def _of_rendered(self, name: str, source: str, messages: list[Message], *, was_cut: bool) -> dict[str, Any]:
        thinking = THINKING[self._settings.thinking or "none"]
        texts = render_response(self._tokenizer, messages, self._ends, enable_thinking=thinking, was_cut=was_cut)
        prompt, output = (list(self._tokenizer(text, add_special_tokens=False).input_ids) for text in texts)
        if not self._vocabulary.end_ids.isdisjoint(output[:-1]):
            raise InvalidRow("an end token inside of the response", f"{texts[1][-60:]!r}")
        if marks := self._vocabulary.marker_ids.intersection(output):
            names = ", ".join(map(str, self._tokenizer.convert_ids_to_tokens(sorted(marks))))
            detail = f"{names}; they would be trained on as tokens"
            raise InvalidRow("the template's markers inside of the response", detail)
        finish = "stop" if output and output[-1] in self._vocabulary.end_ids else "length"
        return self._sample(name, source, prompt, output, origin=DATASET, finish=finish)

    def _sample(
        self, name: str, source: str, prompt: list[int], output: list[int], *, origin: str, finish: str | None
    ) -> dict[str, Any]:
        settings, vocab_size = self._settings, self._target.vocab_size
        outside = [token for token in (*prompt, *output) if not 0 <= token < vocab_size]
        if outside:
            raise InvalidRow("ids outside of the vocabulary", f"{outside[0]}, of {vocab_size} ids")
        if settings.mask_token_id in prompt or settings.mask_token_id in output:
            raise InvalidRow("holds the mask token", f"id {settings.mask_token_id}; it must not occur in text")
        room = settings.max_length - len(prompt)
        if room < MIN_SUPERVISED:
            raise InvalidRow("the prompt exceeds the maximum length", f"{len(prompt)} of {settings.max_length}")
        cut = max(0, len(output) - room)
        output = output[:room]
        output_mask = [int(token != self._vocabulary.pad_id) for token in output]
        if sum(output_mask) < MIN_SUPERVISED:
            raise InvalidRow(f"fewer than {MIN_SUPERVISED} supervised tokens", f"{sum(output_mask)}")
        sample = {
            "id": name,
            "input_ids": prompt + output,
            "loss_mask": [0] * len(prompt) + output_mask,
            "source": source,
            "prompt_tokens": len(prompt),
            "finish": "length" if cut else finish,
            "origin": origin,
        }
        return sample | {"cut": cut} if cut else sample
