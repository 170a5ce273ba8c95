"""Training samples of responses: S token ids, and a loss mask that is 1 on exactly what the target wrote.

A response of the target comes with its ids, sent and returned, and they are taken as they are. Its end token is
supervised because it was emitted. A response of the data set is rendered and encoded in two parts, as a server reads
the one and writes the other. The prompt is what the target's chat template makes of the turns before it, with the
opening of a response; the response is what the template adds when it gets that too. No pattern of role markers is
involved, so it works for any template, and refuses those that rewrite what they were given. Of what the template
adds, only the response's own text counts, and its end token. An empty ``<think></think>`` or a line break after the
end token is the template's, not the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from data_prep.cleaning.conversations import read_conversation
from data_prep.pipeline.rows import Results, errors_as_invalid_row, hash_64, map_rows, row_id, row_name
from data_prep.readers.chunks import Chunk
from data_prep.samples.statistics import TargetVocabulary
from specforge_dspine.utils.chat_template import THINKING, Message, template_errors
from specforge_dspine.utils.cli import Options, option
from specforge_dspine.utils.errors import InvalidRow
from specforge_dspine.utils.files import to_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_SUPERVISED = 2  # an anchor and the token after it
FINISHES = ("stop", "length", None)  # how a response ended: by itself, at a limit, unknown
DATASET = "dataset"  # origin of responses that the target did not write
PLACEHOLDER = "specforge-dspine: a response goes here"


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
        """A sample for every response in ``entry``, or why it gives none; an InvalidRow if there is no response."""
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
            try:  # one response that cannot be used does not cost those after it
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


def render_response(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    ends: Sequence[str],
    *,
    enable_thinking: bool | None,
    was_cut: bool,
) -> tuple[str, str]:
    """The prompt given to the target, and the completion that it would write: the last message, an assistant's.

    An InvalidRow if the template does not render these turns, or not so that the response can be told apart. ``ends``
    are texts of the tokens that end a response; none is added to one that ``was_cut``.
    """
    response = messages[-1]
    reasoning, content = response.get("reasoning_content", "").strip("\n"), response["content"]
    if reasoning and enable_thinking is False:
        raise InvalidRow("reasoning in a response without thinking", "use --thinking on, or leave such rows out")
    switch: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    def render(turns: Sequence[Message], *, opens: bool = False) -> str:
        with template_errors():
            text = tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=opens, **switch)
        assert isinstance(text, str)
        return text

    prompt = render(messages[:-1], opens=True)
    # A placeholder shows what the template puts around the response, whatever words the response itself has.
    framed = _added(prompt, render([*messages[:-1], response | {"content": PLACEHOLDER}]))
    opening, found, tail = framed.partition(PLACEHOLDER)
    if reasoning and reasoning not in opening:
        raise InvalidRow("the template drops the reasoning", f"{reasoning[:60]!r}")
    added = _added(prompt, render(messages))
    body = added[len(opening) : len(added) - len(tail)]
    if not found or not added.startswith(opening) or not added.endswith(tail) or body.strip() != content.strip():
        raise InvalidRow("the template rewrites the response", f"{content[:60]!r} became {added[:60]!r}")
    ending = "" if was_cut else next((text for text in ends if tail.startswith(text)), "")
    if reasoning:  # the target itself opens its reasoning
        return prompt, opening + body + ending
    return prompt + opening, body + ending


def _added(prompt: str, whole: str) -> str:
    """What ``whole`` has after ``prompt``."""
    if not whole.startswith(prompt):
        at = next((k for k, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(whole))
        reason = "the template renders a prompt differently with its response"
        raise InvalidRow(reason, f"at {prompt[at : at + 40]!r}")
    return whole[len(prompt) :]
