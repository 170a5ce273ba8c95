"""Mask token and emittable ids: never pad or eos, never an ordinary token, padded rows never proposed."""

from __future__ import annotations

import pytest
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from specforge_dspine.modeling.vocabulary import output_vocabulary, resolve_mask_token
from tests.support.qwen3_tokenizer import PATTERN, qwen3_tokenizer, vocabulary_file

QWEN3_ROWS, QWEN3_ENTRIES = 151936, 151669


def tokenizer(*added: str, mask: str | None = None, template: str = "") -> PreTrainedTokenizerFast:
    """Ids: pad = eos 0, bos 1, two words, then ``added``."""
    words = {"<end>": 0, "<begin>": 1, "hello": 2, "world": 3}
    built = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="hello")),
        eos_token="<end>",
        pad_token="<end>",
        bos_token="<begin>",
        mask_token=mask,
    )
    built.add_tokens(list(added), special_tokens=True)
    built.chat_template = template
    return built


def test_without_mask_token_and_spare_row_is_an_error_that_names_reserved_ids() -> None:
    # NeMo#2461, ModelOpt#1621: pad, which is eos here, used to become the mask.
    with pytest.raises(ValueError, match=r"set model\.mask_token_id.*4 '<reserved_0>'"):
        resolve_mask_token(tokenizer("<reserved_0>"), 5, None)
    with pytest.raises(ValueError, match="no reserved entry"):
        resolve_mask_token(tokenizer(), 4, None)


def test_a_reserved_id_is_accepted() -> None:
    assert resolve_mask_token(tokenizer("<reserved_0>"), 5, 4) == 4
    assert resolve_mask_token(tokenizer(), 8, 7) == 7, "a padded row"


@pytest.mark.parametrize(
    ("explicit", "problem"),
    [
        (0, "pad and eos token '<end>'"),
        (1, "bos token"),
        (2, "'hello', which occurs"),
        (3, "'world', which occurs"),
        (4, "'<turn>', which occurs"),
        (5, "rows 0 to 4"),
        (-1, "rows 0 to 4"),
    ],
)
def test_an_id_with_a_meaning_is_refused(explicit: int, problem: str) -> None:
    unk_is_hello = tokenizer("<turn>", template="<turn>{{ messages }}")
    with pytest.raises(ValueError, match=rf"model\.mask_token_id = {explicit}.*{problem}"):
        resolve_mask_token(unk_is_hello, 5, explicit)


def test_own_mask_token_comes_before_spare_rows() -> None:
    assert resolve_mask_token(tokenizer(mask="<mask>"), 100, None) == 4
    with pytest.raises(ValueError, match="the tokenizer's mask_token_id = 4"):
        resolve_mask_token(tokenizer(mask="<mask>"), 4, None)


def test_own_mask_token_that_is_the_end_is_refused() -> None:
    with pytest.raises(ValueError, match="eos"):
        resolve_mask_token(tokenizer(mask="<end>"), 100, None)


def test_qwen3_has_fewer_entries_than_rows() -> None:
    qwen = qwen3_tokenizer()
    assert len(qwen) == QWEN3_ENTRIES
    assert resolve_mask_token(qwen, QWEN3_ROWS, None) == QWEN3_ENTRIES
    excluded, valid = output_vocabulary(qwen, QWEN3_ROWS, QWEN3_ENTRIES)
    assert (excluded, valid) == ([QWEN3_ENTRIES], QWEN3_ENTRIES)
    # Its pad token ends responses too (it is in the generation config), so it must stay possible.
    assert qwen.pad_token_id == 151643 and qwen.eos_token_id == 151645
    for token in (qwen.pad_token_id, qwen.eos_token_id):
        with pytest.raises(ValueError, match="needs an id of its own"):
            resolve_mask_token(qwen, QWEN3_ROWS, token)


def test_qwen3_conversion_encodes_like_the_reference() -> None:
    ranks = load_tiktoken_bpe(str(vocabulary_file()))
    reference = tiktoken.Encoding("qwen3", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    found = qwen3_tokenizer()
    for text in ("def f(x):\n    return x ** 2", "Zwölf Boxkämpfer, 你好 12345!", "  tabs\t\tand  spaces \n\n"):
        assert found(text).input_ids == reference.encode(text)
        assert found.decode(found(text).input_ids) == text


def test_placeholders_are_excluded_and_what_may_be_said_is_not() -> None:
    built = tokenizer("<tool>", "<|reserved_special_token_0|>", "<unused7>", "<spare>")
    assert output_vocabulary(built, 16, 7) == ([5, 6, 7], 8)
    assert output_vocabulary(built, 16, 9) == ([5, 6, 9], 8), "a mask in a padded row"
    with pytest.raises(ValueError, match="mask_token_id = 16"):
        output_vocabulary(built, 16, 16)


def test_unused_ids_between_entries_are_excluded() -> None:
    gaps = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1, "z": 4}, unk_token="a"))
    )
    assert output_vocabulary(gaps, 8, 6) == ([2, 3, 6], 5)
    assert resolve_mask_token(gaps, 8, None) == 5
