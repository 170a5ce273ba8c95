"""Training samples: exactly what a server reads and writes, and a mask over exactly what the target wrote."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config

from data_prep import tokenize
from data_prep.samples.builder import SampleBuilder, SampleSettings, Target, render_response
from specforge_dspine.utils.chat_template import SHORT, prompt_ids
from specforge_dspine.utils.errors import InvalidRow
from specforge_dspine.utils.files import model_fingerprint, to_line
from tests.support import ROOT
from tests.support.chat_targets import SMOLLM2, build_chat_target, smollm2_tokenizer
from tests.support.commands import refuse, succeed
from tests.support.qwen3_tokenizer import qwen3_chat_tokenizer
from tests.support.small import save_tokenizer
from tests.support.targets import build_llama

EMPTY_REASONING = "<think>\n\n</think>\n\n"
MASK = 151669
CHAT = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4.", "reasoning_content": "Two and two."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "think"},
]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with Qwen3's true tokenizer and a config, without weights."""
    path = tmp_path_factory.mktemp("qwen")
    qwen3_chat_tokenizer().save_pretrained(path)
    Qwen3Config(vocab_size=151936, max_position_embeddings=4096).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chat_target("smollm2", tmp_path_factory.mktemp("targets") / "smollm2")


@cache
def loaded(target: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(target)


def builder(target: Path, mask: int = MASK, vocab_size: int = 151936, **changed: Any) -> SampleBuilder:
    given = {"max_length": 512, "use_dataset_responses": True, "mask_token_id": mask} | changed
    known = Target(target, model_fingerprint(target)[:SHORT], vocab_size)
    return SampleBuilder(SampleSettings(**given), known, loaded(target))


def built(target: Path, messages: list[dict[str, Any]], **changed: Any) -> list[Any]:
    return list(builder(target, **changed).samples("test", {"messages": messages}))


def supervised(sample: dict[str, Any], tokenizer: Any) -> str:
    pairs = zip(sample["input_ids"], sample["loss_mask"], strict=True)
    return tokenizer.decode([token for token, mask in pairs if mask])


def prompt(sample: dict[str, Any]) -> list[int]:
    return sample["input_ids"][: sample["prompt_tokens"]]


def test_thinking_off_teaches_the_response_and_its_end_alone(qwen: Path) -> None:
    # SpecForge#296, NeMo#3738: the template's own <think></think> was trained on.
    tokenizer = loaded(qwen)
    plain = [{key: value for key, value in part.items() if key != "reasoning_content"} for part in CHAT]
    first, second = built(qwen, plain, thinking="off")
    assert supervised(first, tokenizer) == "It is 4.<|im_end|>" and supervised(second, tokenizer) == "think<|im_end|>"
    assert prompt(first) == prompt_ids(tokenizer, plain[:1], enable_thinking=False)
    assert prompt(second) == prompt_ids(tokenizer, plain[:3], enable_thinking=False)
    assert tokenizer.decode(first["input_ids"]).count("<think>") == 1
    assert first["input_ids"][-1] == tokenizer.eos_token_id and first["finish"] == "stop"


def test_thinking_on_teaches_the_reasoning_with_its_markers(qwen: Path) -> None:
    tokenizer = loaded(qwen)
    first, second = built(qwen, CHAT, thinking="on")
    assert supervised(first, tokenizer) == "<think>\nTwo and two.\n</think>\n\nIt is 4.<|im_end|>"
    assert prompt(first) == prompt_ids(tokenizer, CHAT[:1], enable_thinking=True)
    # The response without reasoning: what the template inserts is given, not taught.
    assert supervised(second, tokenizer) == "think<|im_end|>"
    assert tokenizer.decode(prompt(second)).endswith(f"assistant\n{EMPTY_REASONING}")
    assert "Two and two" not in tokenizer.decode(second["input_ids"])
    (invalid, _) = built(qwen, CHAT, thinking="off")
    assert isinstance(invalid, InvalidRow) and invalid.reason == "reasoning in a response without thinking"


def test_smollm2_is_taught_up_to_the_end_token(smollm2: Path) -> None:
    tokenizer = loaded(smollm2)
    first, second = built(smollm2, [*CHAT[:1], {"role": "assistant", "content": "im_end 4"}, *CHAT[2:]], mask=3)
    assert supervised(first, tokenizer) == "im_end 4<|im_end|>", "the line break after it is the template's"
    assert supervised(second, tokenizer) == "think<|im_end|>"
    assert "named SmolLM" in tokenizer.decode(prompt(first))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id, "and so never masked by the pad id"
    (invalid, _) = built(smollm2, CHAT, mask=3)
    assert isinstance(invalid, InvalidRow) and invalid.reason == "the template drops the reasoning"


def test_a_cut_response_is_not_taught_to_end(qwen: Path) -> None:
    tokenizer = loaded(qwen)
    entry = {"messages": [*CHAT[:1], {"role": "assistant", "content": "It is"}], "finish_reason": "length"}
    (sample,) = builder(qwen, thinking="off").samples("test", entry)
    assert supervised(sample, tokenizer) == "It is" and sample["finish"] == "length"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}<{{ m.content | upper }}>{% endfor %}", "the template rewrites the response"),
        ("{{ messages[0].content }}", "the template rewrites the response"),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "renders a prompt differently"),
        ("{{ raise_exception('no such role') }}", "the template refuses these turns"),
    ],
)
def test_templates_that_hide_the_response_are_refused(template: str, reason: str) -> None:
    tokenizer = smollm2_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(InvalidRow, match=reason):
        render_response(tokenizer, CHAT[:1] + CHAT[3:], ["<|im_end|>"], enable_thinking=None, was_cut=False)


def test_an_end_inside_of_a_response_is_refused(qwen: Path) -> None:
    (invalid,) = built(qwen, [*CHAT[:1], {"role": "assistant", "content": "It is<|im_end|> 4."}], thinking="off")
    assert invalid.reason == "an end token inside of the response"


def record(folder: Path, **changed: Any) -> dict[str, Any]:
    made_by = model_fingerprint(folder)[:SHORT]
    ids = {"prompt_ids": [5, 6, 7], "output_ids": [8, 9, 2]}
    return {"id": "a.0", "source": "s", "target": made_by, "finish": "stop"} | ids | changed


def test_records_are_taken_as_they_are(smollm2: Path) -> None:
    (sample,) = builder(smollm2, mask=3).samples("test", record(smollm2))
    assert (sample["input_ids"], sample["loss_mask"]) == ([5, 6, 7, 8, 9, 2], [0, 0, 0, 1, 1, 1])
    (cut,) = builder(smollm2, mask=3).samples("test", record(smollm2, output_ids=[8, 9], finish="length"))
    assert cut["input_ids"][-1] == 9 and cut["finish"] == "length"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"target": "another"}, "a response of another target"),
        ({"output_ids": [8, 3, 2]}, "holds the mask token"),
        ({"prompt_ids": [3]}, "holds the mask token"),
        ({"output_ids": [8]}, "fewer than 2 supervised tokens"),
        ({"output_ids": "text"}, "ids are not lists of integers"),
        ({"prompt_ids": [True]}, "ids are not lists of integers"),
        ({"prompt_ids": [5] * 511}, "the prompt exceeds the maximum length"),
        ({"output_ids": [8, 288, 2]}, "ids outside of the vocabulary"),
        ({"prompt_ids": [-1]}, "ids outside of the vocabulary"),
        ({"prompt_ids": [2**40]}, "ids outside of the vocabulary"),
        ({"output_ids": [8, 2, 9, 2]}, "an end token inside of the response"),
        ({"output_ids": [8, 9, 2, 2]}, "an end token inside of the response"),
        ({"finish": "abort"}, "unknown finish"),
        ({"finish": ["stop"]}, "unknown finish"),
    ],
)
def test_records_that_cannot_be_used_say_why(smollm2: Path, changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRow) as caught:
        list(builder(smollm2, mask=3, vocab_size=288).samples("test", record(smollm2, **changed)))
    assert caught.value.reason == reason


def test_what_a_record_lacks_is_not_made_up(smollm2: Path) -> None:
    whole = record(smollm2)
    for lacking in ("finish", "id", "source"):
        (sample,) = builder(smollm2, mask=3).samples("dir/s.jsonl", {k: v for k, v in whole.items() if k != lacking})
        assert "None" not in to_line(sample).decode()
        assert (sample["finish"] is None) == (lacking == "finish")
        assert sample["id"].startswith("s-jsonl-") == (lacking == "id")
        assert (sample["source"] == "dir/s.jsonl") == (lacking == "source")


@pytest.mark.parametrize(
    "entry",
    [
        {"instruction": "What is", "input": "2 + 2?", "output": "It is 4."},
        {"prompt": "What is 2 + 2?", "response": "It is 4."},
        {
            "system": "Add.",
            "conversations": [{"from": "human", "value": "2 + 2"}, {"from": "gpt", "value": "It is 4."}],
        },
    ],
)
def test_responses_beside_a_question_are_taken(smollm2: Path, entry: dict[str, Any]) -> None:
    (sample,) = builder(smollm2, mask=3).samples("test", entry)
    assert supervised(sample, loaded(smollm2)) == "It is 4.<|im_end|>"
    assert ("Add." in loaded(smollm2).decode(prompt(sample))) == ("system" in entry)
    with pytest.raises(InvalidRow, match="no response"):
        list(builder(smollm2, mask=3).samples("test", {"prompt": "What is 2 + 2?", "response": " "}))


def test_an_unforeseen_error_costs_one_response(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_by = builder(smollm2, mask=3)
    render = made_by._of_rendered
    failing = lambda name, *rest, **more: {}["gone"] if name.endswith(".0") else render(name, *rest, **more)  # noqa: E731
    monkeypatch.setattr(made_by, "_of_rendered", failing)
    plain = [{"role": part["role"], "content": part["content"]} for part in CHAT]
    failed, sample = made_by.samples("test", {"messages": plain})
    assert isinstance(failed, InvalidRow) and failed.reason == "unexpected KeyError"
    assert not isinstance(sample, InvalidRow)


def test_the_maximum_length_never_cuts_unnoticed(smollm2: Path) -> None:
    long = record(smollm2, output_ids=[*range(10, 30), 2])
    (sample,) = builder(smollm2, mask=3, max_length=10).samples("test", long)
    assert sample["input_ids"] == [5, 6, 7, *range(10, 17)] and sample["cut"] == 14
    assert sample["finish"] == "length", "its end is gone, and not taught"


def test_padding_is_never_taught(tmp_path: Path) -> None:
    target = save_tokenizer(build_llama(tmp_path / "llama"))
    (sample,) = builder(target, mask=250).samples("test", record(target, output_ids=[8, 9, 2, 0, 0]))
    assert sample["loss_mask"] == [0, 0, 0, 1, 1, 1, 0, 0]


def write(path: Path, *entries: Any) -> Path:
    path.write_bytes(b"".join(map(to_line, entries)))
    return path


def words(target: Path, responses: Path, out: Path, *further: str) -> list[str]:
    return ["--input", str(responses), "--output", str(out), "--target", str(target), *further]


def run(target: Path, responses: Path, out: Path, *further: str) -> list[dict[str, Any]]:
    succeed(tokenize.main, words(target, responses, out, *further))
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_the_command_counts_responses_and_names_what_it_drops(smollm2: Path, tmp_path: Path) -> None:
    responses = write(
        tmp_path / "responses.jsonl",
        record(smollm2),
        {"messages": CHAT},
        record(smollm2, target="another"),
        record(smollm2, id="b.0", output_ids=[8] * 50),
    )
    out = tmp_path / "samples.jsonl"
    options = ("--mask-token-id", "3", "--max-length", "20")
    assert [row["id"] for row in run(smollm2, responses, out, *options)] == ["a.0", "b.0"]
    summary = json.loads(Path(f"{out}.summary.json").read_text())
    assert (summary["rows_in"], summary["rows_kept"], summary["cut_by_max_length"]) == (4, 2, 1)
    assert summary["rows_dropped"] == {"a response of another target": 1, "not a response of the target": 1}
    dropped = [json.loads(line) for line in Path(f"{out}.dropped.jsonl").read_text().splitlines()]
    assert [row["line"] for row in dropped] == [2, 3] and "--use-dataset-responses" in dropped[0]["detail"]
    further = ("--mask-token-id", "3", "--use-dataset-responses", "--max-length", "400")
    samples = run(smollm2, responses, tmp_path / "f.jsonl", *further)
    assert [row["origin"] == "dataset" for row in samples] == [False, True, False]


def test_the_mask_token_is_reserved_or_asked_for(smollm2: Path, tmp_path: Path) -> None:
    # NeMo#2461, ModelOpt#1621: pad, which is the end token here, used to become the mask.
    responses = write(tmp_path / "responses.jsonl", record(smollm2))
    command = words(smollm2, responses, tmp_path / "out.jsonl", "--mask-token-id")
    refuse(tokenize.main, [*command, "2"], r"mask_token_id = 2 .*needs an id of its own.*--mask-token-id")
    refuse(tokenize.main, [*command, "3", "--thinking", "none"], "--thinking is for --use-dataset-responses")


KILLED = """
import os, sys
from data_prep import tokenize
from data_prep.pipeline import row_stream
from specforge_dspine.utils.ledger import Ledger
row_stream.COMMIT_S, commit, commits = 0, Ledger.commit, []
def counted(self):
    commit(self)
    commits.append(1)
    if len(commits) == 3:
        os.kill(os.getpid(), 9)
Ledger.commit = counted
sys.exit(tokenize.main(sys.argv[1:]))
"""


def test_killed_and_continued_gives_the_same_file(smollm2: Path, tmp_path: Path) -> None:
    folder = tmp_path / "responses"
    folder.mkdir()
    for number in range(6):
        many = [record(smollm2, id=f"{number}.{k}", prompt_ids=[5 + k, 6, 7 + number]) for k in range(20)]
        write(folder / f"{number}.jsonl", *many, record(smollm2, id=f"{number}", target="another"))
    options = ["--target", str(smollm2), "--mask-token-id", "3", "--max-length", "5", "--workers", "1"]
    undisturbed, killed = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    succeed(tokenize.main, ["--input", str(folder), "--output", str(undisturbed), *options])
    child = [sys.executable, "-c", KILLED, "--input", str(folder), "--output", str(killed), *options]
    assert subprocess.run(child, cwd=ROOT, capture_output=True).returncode == -9
    with sqlite3.connect(f"{killed}.partial") as db:
        (kept,) = db.execute("SELECT COUNT(*) FROM kept").fetchone()
    assert 0 < kept < 120 and not killed.exists()
    succeed(tokenize.main, ["--input", str(folder), "--output", str(killed), *options])
    for suffix in ("", ".dropped.jsonl"):
        assert Path(f"{killed}{suffix}").read_bytes() == Path(f"{undisturbed}{suffix}").read_bytes()
    summaries = [json.loads(Path(f"{path}.summary.json").read_text()) for path in (killed, undisturbed)]
    for summary in summaries:
        del summary["sha256"], summary["rows_by_file"]
    assert summaries[0] == summaries[1] and summaries[0]["cut_by_max_length"] == 120


def test_the_key_covers_template_tokenizer_options_length_and_format(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Soup#1067: cached tokenization was reused after the template, the length or the tokenizer had changed.
    target = tmp_path / "target"
    shutil.copytree(smollm2, target)
    responses = write(tmp_path / "responses.jsonl", record(smollm2), {"messages": CHAT[:1] + CHAT[3:]})
    out = tmp_path / "out.jsonl"
    options = ("--mask-token-id", "3")
    run(target, responses, out, *options)
    before = out.read_bytes()
    run(target, responses, out, *options)
    for further, named in (
        (("--max-length", "100"), "max_length"),
        (("--use-dataset-responses",), "use_dataset_responses"),
        (("--limit", "1"), "limit"),
    ):
        refuse(tokenize.main, words(target, responses, out, *options, *further), f"{named} was .* and is now")
    monkeypatch.setattr(tokenize, "FORMAT_VERSION", 2)
    refuse(tokenize.main, words(target, responses, out, *options), "format_version was 1 and is now 2")
    monkeypatch.undo()
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = SMOLLM2.replace("helpful", "kind")
    tokenizer.save_pretrained(target)
    refuse(tokenize.main, words(target, responses, out, *options), "chat_template was")
    tokenizer.chat_template = SMOLLM2
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(target)
    refuse(tokenize.main, words(target, responses, out, *options), "tokenizer was")
    weights = bytearray((target / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (target / "model.safetensors").write_bytes(weights)
    refuse(tokenize.main, words(target, responses, out, *options), "fingerprint was")
    assert out.read_bytes() == before


def test_another_end_token_is_another_job(tmp_path: Path) -> None:
    """The generation config says which tokens end a response (pitfall 15: a stale mask)."""
    target = save_tokenizer(build_llama(tmp_path / "llama"))
    responses, out = write(tmp_path / "responses.jsonl", record(target)), tmp_path / "out.jsonl"
    further = ["--max-length", "64", "--mask-token-id", "250"]
    run(target, responses, out, *further)
    config = target / "generation_config.json"
    known = json.loads(config.read_text()) if config.exists() else {}
    config.write_text(json.dumps(known | {"eos_token_id": 77}))
    refuse(tokenize.main, words(target, responses, out, *further), "tokenizer was")
