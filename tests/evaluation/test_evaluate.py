"""The evaluation of a trained draft: lossless, replayed as decoded, continued after a kill, from both layouts and
through a server; and reports made of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specforge_dspine.evaluate import main
from specforge_dspine.evaluation.results import RESULT, ROUNDS
from specforge_dspine.report import main as report
from specforge_dspine.streaming.server import ManagedServer
from specforge_dspine.train import main as train
from specforge_dspine.utils.ledger import Ledger
from tests.support.features import generate, write_features, write_responses
from tests.support.reports import check_report
from tests.support.small import save_tokenizer, tiny_recipe
from tests.support.targets import EOS, build_qwen3

LAYERS = [0, 2, 4]
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }} w7 {{ m['content'] }} {% endfor %}w9"
NEW, PROMPTS, RESPONSES = 16, 5, 12


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that chats, its own greedy responses with their states, a draft trained on them for a few steps, a
    plain DFlash draft, and conversations to evaluate."""
    root = tmp_path_factory.mktemp("evaluate")
    target = save_tokenizer(build_qwen3(root / "target"))
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(target)
    responses = write_responses(target, root / "responses.jsonl", RESPONSES, tokens=20)
    write_features(target, responses, root / "features", LAYERS)
    for name, method in (
        ("run", {}),
        ("plain", {"injection": False, "alignment": "off", "causal": False}),
    ):
        document = tiny_recipe(
            target,
            root / name,
            data={"hidden_states_path": str(root / "features")},
            dspine=method,
            training={"max_steps": 60, "num_epochs": 20, "learning_rate": 5e-3, "num_anchors": 12},
        )
        (root / f"{name}.yaml").write_text(json.dumps(document), encoding="utf-8")
        assert train(["--recipe", str(root / f"{name}.yaml")]) == 0
    rows = [{"question": f"w{20 + i} w{30 + 2 * i} w{12 + 3 * i}"} for i in range(PROMPTS)]
    lines = [json.dumps(row) for row in rows]
    lines[2:2] = ['{"question": ', '{"question": ["w4", 7]}']  # lines 3 and 4
    (root / "gsm8k.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    turns = [{"question_id": i, "turns": [f"w{40 + i} w11", f"w{50 + i}"]} for i in range(3)]
    (root / "bench.json").write_text(json.dumps(turns), encoding="utf-8")
    return root


def evaluate(arguments: list[str]) -> int:
    """The exit status, also of options that are out of range."""
    try:
        return main(arguments)
    except SystemExit as refused:
        return int(refused.code or 0)


def words(toy: Path, out: Path, *extra: object, draft: str = "run/export/sglang") -> list[str]:
    fixed = ["--draft", toy / draft, "--target", toy / "target", "--out", out, "--max-new-tokens", NEW]
    return [str(word) for word in (*fixed, *extra)]


def result_of(out: Path) -> dict[str, Any]:
    return json.loads((out / RESULT).read_text(encoding="utf-8"))


def records_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / ROUNDS).read_text(encoding="utf-8").splitlines()]


def without_clock(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def sets(toy: Path) -> list[str]:
    return ["--sets", f"gsm8k={toy / 'gsm8k.jsonl'}", f"mt-bench={toy / 'bench.json'}"]


DRAFTS = ("run/export/sglang", "run/export/specforge", "plain/export/sglang", "plain/export/specforge")


def test_every_draft_gives_the_targets_own_responses(toy: Path, tmp_path: Path) -> None:
    """Both layouts, with injection and plain, trained and untrained; second turns follow the first responses."""
    model = AutoModelForCausalLM.from_pretrained(toy / "target", dtype=torch.float32).eval()
    responses, taus = [], {}
    for index, (draft, variant) in enumerate([*((draft, "draft") for draft in DRAFTS), (DRAFTS[0], "untrained")]):
        out = tmp_path / str(index)
        assert evaluate(words(toy, out, *sets(toy), "--variant", variant, draft=draft)) == 0
        records = records_of(out)
        assert len(records) == PROMPTS + 2 * 3
        for record in records:
            ids, start = record["trace"]["ids"], record["trace"]["prompt"]
            assert ids[start:] == generate(model, ids[:start], NEW), record["prompt"]
        responses.append([record["trace"]["ids"] for record in records])
        taus[draft, variant] = result_of(out)["temperatures"]["0"]["overall"]["tau"]
    assert all(each == responses[0] for each in responses)
    assert taus[DRAFTS[0], "draft"] == taus[DRAFTS[1], "draft"], "the same draft in two layouts"
    assert taus[DRAFTS[2], "draft"] == taus[DRAFTS[3], "draft"]


def test_second_turns_follow_the_first_responses(toy: Path, tmp_path: Path) -> None:
    assert evaluate(words(toy, tmp_path, *sets(toy))) == 0
    tokenizer = AutoTokenizer.from_pretrained(toy / "target")
    by_turn = {(record["prompt"], record["turn"]): record["trace"] for record in records_of(tmp_path)}
    first, second = by_turn["mt-bench-1", 0], by_turn["mt-bench-1", 1]
    said = tokenizer.decode(first["ids"][first["prompt"] :], skip_special_tokens=True)
    asked = tokenizer.decode(second["ids"][: second["prompt"]])
    assert said in asked and asked.endswith("w50 w9")


def test_the_result_says_what_was_measured_and_how(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(words(toy, tmp_path, *sets(toy), "--temperature", "0", "1", "--top-p", "0.9")) == 0
    shown, logged = capsys.readouterr()
    assert f"{toy / 'gsm8k.jsonl'}, skipped: line 3: not JSON" in logged
    assert f"{toy / 'gsm8k.jsonl'}, skipped: line 4: content is not text" in logged
    result = result_of(tmp_path)
    assert [skip["line"] for skip in result["sets"]["gsm8k"]["skipped"]] == [3, 4]
    assert result["sets"]["gsm8k"]["instruction"].startswith("{question}")
    assert (
        len(result["chat_template"]["sha256"]) == 64
        and result["chat_template"]["thinking"] == "the template's default"
    )
    assert result["target"]["verified_by"] == "transformers" and result["target"]["dtype"] == "float32"
    assert result["draft"]["refinement"] and len(result["draft"]["fingerprint"]) == 64
    assert result["versions"]["torch"] == torch.__version__
    records = records_of(tmp_path)
    for name, temperature in (("0", 0.0), ("1", 1.0)):
        entry = result["temperatures"][name]
        assert set(entry["sets"]) == {"gsm8k", "mt-bench"}
        own = [record for record in records if record["temperature"] == temperature]
        overall = entry["overall"]
        assert overall["rounds"] == sum(len(record["trace"]["rounds"]) for record in own)
        assert sum(overall["accepted_lengths"]) == overall["rounds"]
        assert overall["prompts"] == PROMPTS + 3 and overall["responses"] == PROMPTS + 6
        low, high = overall["tau_interval_95"]
        assert low <= overall["tau"] <= high
        assert f"{overall['tau']:.3f}" in shown
    greedy, warm = ([r["trace"]["ids"] for r in records if r["temperature"] == t] for t in (0.0, 1.0))
    assert greedy != warm


def start(toy: Path, out: Path, *extra: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "specforge_dspine.evaluate", *words(toy, out, *extra)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_evaluation_continues_to_the_same_result(toy: Path, tmp_path: Path, number: int) -> None:
    extra = [*sets(toy), "--temperature", "0", "1"]
    assert evaluate(words(toy, tmp_path / "whole", *extra)) == 0
    process = start(toy, tmp_path / "killed", *extra)
    assert process.stderr is not None
    try:
        shown = b""
        while not re.search(rb"responses: [^\r]* [3-9]/\d+ ", shown):
            part = os.read(process.stderr.fileno(), 1 << 16)
            assert part, shown
            shown += part
    finally:
        process.send_signal(number)
        status = process.wait()
        process.stderr.close()
    assert status == (-number if number == signal.SIGKILL else 128 + number)
    summary = json.loads((tmp_path / "whole" / f"{ROUNDS}.summary.json").read_text())
    with Ledger([tmp_path / "killed" / ROUNDS], "evaluate", summary["inputs"]) as ledger:
        kept = list(ledger.kept())
    assert 3 <= len(kept) < 2 * (PROMPTS + 6)
    assert evaluate(words(toy, tmp_path / "killed", *extra)) == 0
    whole, continued = (records_of(tmp_path / name) for name in ("whole", "killed"))
    assert without_clock(continued) == without_clock(whole)
    assert continued[: len(kept)] == kept, "what was there was not decoded again"
    results = [result_of(tmp_path / name)["temperatures"] for name in ("whole", "killed")]
    assert results[0] == results[1]


def test_other_inputs_are_refused_and_named(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(words(toy, tmp_path, *sets(toy), "--limit", "1")) == 0
    before = records_of(tmp_path)
    assert evaluate(words(toy, tmp_path, *sets(toy), "--limit", "1")) == 0
    assert records_of(tmp_path) == before, "finished: nothing is decoded again"
    assert evaluate(words(toy, tmp_path, *sets(toy), "--limit", "2")) == 2
    assert "limit was 1 and is now 2" in capsys.readouterr().err
    for extra, named in ((["--seed", "3"], "decoding.seed was"), (["--variant", "unrefined"], "draft.variant was")):
        assert evaluate(words(toy, tmp_path, *sets(toy), "--limit", "1", *extra)) == 2
        assert named in capsys.readouterr().err
    draft = str(toy / "run" / "export" / ".." / "export" / "sglang")
    assert evaluate(words(toy, tmp_path, *sets(toy), "--limit", "1", draft=draft)) == 0, "the same, said otherwise"
    assert evaluate(words(toy, tmp_path, *sets(toy), "--limit", "2", "--overwrite")) == 0
    assert len(records_of(tmp_path)) == 2 + 4
    target = tmp_path / "target"
    shutil.copytree(toy / "target", target)
    config = target / "generation_config.json"
    known = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    config.write_text(json.dumps(known | {"eos_token_id": 77}), encoding="utf-8")
    assert evaluate(words(toy, tmp_path, *sets(toy), "--limit", "2", "--target", target)) == 2
    assert "target.end_ids was [" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["--sets", "nonsense"], "set nonsense: unknown"),
        (["--sets", "gsm8k={toy}/none.jsonl"], "there is no {toy}/none.jsonl"),
        (["--sets", "gsm8k={toy}/gsm8k.jsonl", "gsm8k={toy}/gsm8k.jsonl"], "occurs twice"),
        (["--sets", "gsm8k={toy}/gsm8k.jsonl", "--temperature", "-1"], "--temperature ['-1']: temperature = -1"),
        (["--sets", "gsm8k={toy}/gsm8k.jsonl", "--thinking", "off"], "no such switch"),
        (["--sets", "gsm8k={toy}/gsm8k.jsonl", "--temperature", "1e-40"], "or at least 0.01"),
        (["--sets", "gsm8k={toy}/gsm8k.jsonl", "--device", "nonsense"], "--device nonsense"),
        (
            ["--sets", "gsm8k={toy}/gsm8k.jsonl", "--target", "{toy}/none"],
            "--target {toy}/none: no such file",
        ),
        (["--sets", "captured={toy}/target"], "holds no prompt"),
        (["--sets", "captured={toy}/features", "--verify-live", "1", "--dtype", "bfloat16"], "bfloat16"),
        (["--sets", "gsm8k={toy}/gsm8k.jsonl", "--top-p", "0"], "--top-p 0: input should be greater than 0"),
        (["--sets", "gsm8k={toy}/gsm8k.jsonl", "--max-new-tokens", "1"], "--max-new-tokens 1: input"),
    ],
)
def test_what_cannot_be_evaluated_is_said(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], named: str
) -> None:
    filled = [word.replace("{toy}", str(toy)) for word in extra]
    assert evaluate(words(toy, tmp_path, *filled)) == 2
    assert named.replace("{toy}", str(toy)) in capsys.readouterr().err


def test_a_draft_of_another_target_is_refused(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(toy / "target", tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"vocab_size": 300}
    path.write_text(json.dumps(config), encoding="utf-8")
    arguments = words(toy, tmp_path / "out", *sets(toy), "--target", tmp_path / "other")
    assert evaluate(arguments) == 2
    assert "vocab_size=256" in capsys.readouterr().err


def test_prompts_that_do_not_fit_are_skipped_and_said(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"question": "w9 " * 600}) + "\n" + json.dumps({"question": "w9"}) + "\n")
    assert evaluate(words(toy, tmp_path / "out", "--sets", f"gsm8k={long}")) == 0
    skipped = result_of(tmp_path / "out")["responses_skipped"]
    assert [entry["prompt"] for entry in skipped] == ["gsm8k-1"] and "room for 512" in skipped[0]["skipped"]
    assert evaluate(words(toy, tmp_path / "none", "--sets", f"gsm8k={long}", "--limit", 1)) == 2
    assert "no response had a round" in capsys.readouterr().err
    captured = ["--sets", f"captured={toy / 'features'}", "--temperature", 1, "--max-new-tokens", 700]
    assert evaluate(words(toy, tmp_path / "captured", *captured)) == 2
    assert "room for 512" in result_of(tmp_path / "captured")["responses_skipped"][0]["skipped"]


def test_a_third_party_dflash_draft_is_read(toy: Path, tmp_path: Path) -> None:
    """Its config.json without our section and flags, as plain DFlash checkpoints have it: the same rounds."""
    third_party = tmp_path / "third_party"
    shutil.copytree(toy / "plain" / "export" / "sglang", third_party)
    path = third_party / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("dspine_config", "is_causal", "rope_parameters"):
        del config[key]
    config["dflash_config"] = {key: config["dflash_config"][key] for key in ("mask_token_id", "target_layer_ids")}
    path.write_text(json.dumps(config), encoding="utf-8")
    traces = []
    for name, draft in (("ours", toy / "plain" / "export" / "sglang"), ("third_party", third_party)):
        assert evaluate(words(toy, tmp_path / name, *sets(toy), "--temperature", "0", draft=str(draft))) == 0
        traces.append([record["trace"] for record in records_of(tmp_path / name)])
    assert traces[0] == traces[1]


def test_captured_responses_are_replayed_as_they_would_be_decoded(toy: Path, tmp_path: Path) -> None:
    """Every round of every response, against the target itself; the report follows from the traces."""
    captured = ["--sets", f"captured={toy / 'features'}", "--max-new-tokens", 20]
    variants = {
        "refined": ["--verify-live", RESPONSES],
        "unrefined": ["--verify-live", RESPONSES, "--variant", "unrefined"],
        "untrained": ["--variant", "untrained", "--limit", 4],
        "sampled": ["--temperature", 1, "--limit", 4],
    }
    for name, extra in variants.items():
        assert evaluate(words(toy, tmp_path / name, *captured, *extra)) == 0
    responses = [json.loads(line)["input_ids"] for line in (toy / "responses.jsonl").read_text().splitlines()]
    for name in ("refined", "unrefined"):
        assert sorted(record["trace"]["ids"] for record in records_of(tmp_path / name)) == sorted(responses)
        assert result_of(tmp_path / name)["decoded_live"] == RESPONSES
    assert any(EOS in ids[8:] for ids in responses) or all(len(ids) == 28 for ids in responses)
    folders = [f"{name}={tmp_path / name}" for name in variants]
    arguments = ["--evaluations", *folders, "--out", str(tmp_path / "report"), "--run", str(toy / "run")]
    assert report(arguments) == 0
    content = check_report(tmp_path / "report" / "report.json")
    assert content["prompts"] == RESPONSES and content["decoded_live"] == 2 * RESPONSES
    assert content["variants"]["refined"]["tau"] > 1, "a draft that never gets anything accepted proves little"
    assert content["variants"]["sampled"]["temperature"] == 1
    assert (tmp_path / "report" / "report.png").read_bytes()[:4] == b"\x89PNG"


def not_greedy(record: dict[str, Any]) -> None:
    record["input_ids"][-3] = 5 if int(record["input_ids"][-3]) != 5 else 6  # not what the target says


def with_a_hole(record: dict[str, Any]) -> None:
    record["loss_mask"][-4] = 0


def with_other_states(record: dict[str, Any]) -> None:
    record["hidden_states"] = torch.randn_like(record["hidden_states"])


@pytest.mark.parametrize(
    ("change", "live", "status", "named"),
    [
        (not_greedy, [], 2, "token 17 of the response is not the target's greedy choice"),
        (with_a_hole, [], 2, "its loss mask has 2 runs"),
        (with_other_states, ["--verify-live", 1], 1, "decoding gave"),
    ],
)
def test_a_record_whose_replay_would_be_false_is_an_error(
    change: Any,
    live: list[Any],
    status: int,
    named: str,
    toy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    features = tmp_path / "features"
    shutil.copytree(toy / "features", features)
    path = max(features.glob("*.ckpt"), key=lambda each: len(torch.load(each)["input_ids"]))
    record = torch.load(path)
    change(record)
    for other in features.glob("*.ckpt"):
        other.unlink()
    torch.save(record, path)
    captured = ["--sets", f"captured={features}", "--max-new-tokens", 20, *live]
    assert evaluate(words(toy, tmp_path / "out", *captured)) == status
    said = capsys.readouterr().err
    assert named in said and path.stem in said


def test_captured_responses_of_any_length_are_replayed(toy: Path, tmp_path: Path) -> None:
    """Longer than --max-new-tokens: cut; of one token: no round, and nothing in the result."""
    features = tmp_path / "features"
    shutil.copytree(toy / "features", features)
    path = min(features.glob("*.ckpt"))
    record = torch.load(path)
    whole = int(record["loss_mask"].argmax()) + 1
    for name in ("input_ids", "loss_mask"):
        record[name] = record[name][:whole]
    for name in ("hidden_states", "target_last_hidden_states"):
        record[name] = record[name][:, :whole]
    torch.save(record, path)
    captured = ["--sets", f"captured={features}", "--max-new-tokens", 10, "--verify-live", RESPONSES]
    assert evaluate(words(toy, tmp_path / "out", *captured)) == 0
    lengths = {r["prompt"]: len(r["trace"]["ids"]) - r["trace"]["prompt"] for r in records_of(tmp_path / "out")}
    assert lengths.pop(path.stem) == 1 and set(lengths.values()) <= set(range(2, 11)) and 10 in lengths.values()
    result = result_of(tmp_path / "out")
    assert result["chat_template"] is None, "the records' prompts were rendered before"
    assert result["sets"]["features"]["responses"] == "captured"


def test_only_the_same_is_compared(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    captured = ["--sets", f"captured={toy / 'features'}", "--max-new-tokens", 20]
    assert evaluate(words(toy, tmp_path / "refined", *captured, "--limit", 3)) == 0
    unrefined = [*captured, "--variant", "unrefined"]
    others = {
        "more": (words(toy, tmp_path / "more", *unrefined, "--limit", 4), "different prompts"),
        "warm": (
            words(toy, tmp_path / "warm", *unrefined, "--limit", 3, "--temperature", 1),
            "in decoding temperature",
        ),
        "plain": (words(toy, tmp_path / "plain", *captured, "--limit", 3, draft=DRAFTS[2]), "in draft fingerprint"),
    }
    for name, (arguments, named) in others.items():
        assert evaluate(arguments) == 0
        folders = [f"refined={tmp_path / 'refined'}", f"unrefined={tmp_path / name}"]
        assert report(["--evaluations", *folders, "--out", str(tmp_path / "report")]) == 2
        assert named in capsys.readouterr().err


def test_an_unfinished_evaluation_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none").mkdir()
    assert report(["--evaluations", f"a={tmp_path / 'none'}", "--out", str(tmp_path)]) == 2
    assert "is the evaluation finished?" in capsys.readouterr().err


@pytest.mark.server
def test_a_server_verifies_as_the_model_does(toy: Path, tmp_path: Path) -> None:
    """The same greedy responses and the same rounds; sampled ones go through it too."""
    extra = [*sets(toy), "--limit", 2]
    assert evaluate(words(toy, tmp_path / "model", *extra)) == 0
    with ManagedServer(str(toy / "target"), tmp_path / "server", LAYERS, dtype="float32") as server:
        assert evaluate(words(toy, tmp_path / "served", *extra, "--server", server.url)) == 0
        assert evaluate(words(toy, tmp_path / "warm", *extra, "--server", server.url, "--temperature", 1)) == 0
        assert not list(server.spool.iterdir()), "every record was consumed"
    ours, theirs = ([r["trace"] for r in records_of(tmp_path / name)] for name in ("model", "served"))
    assert ours == theirs
    assert result_of(tmp_path / "served")["target"]["verified_by"] == "SGLang server"
    assert result_of(tmp_path / "warm")["temperatures"]["1"]["overall"]["tau"] >= 1
