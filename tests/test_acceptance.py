"""Acceptance length: the replay against real decoding, the walk, intervals, and reports recomputed from traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from features import write_features
from small import save_tokenizer, tiny_recipe, write_samples
from targets import EOS, build_qwen3
from transformers import AutoModelForCausalLM

from specforge_dspine.acceptance import Round, Trace, accepted_prefix, decode_live, replay, tau, tau_interval
from specforge_dspine.export import load_draft
from specforge_dspine.report import main as report
from specforge_dspine.report import untrained_like
from specforge_dspine.train import main as train

LAYERS = [0, 2, 4]
PUBLISHED = Path(__file__).parent.parent / "docs" / "demo" / "report.json"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, its own greedy answers on 12 prompts with their states, and a draft trained for a few steps."""
    root = tmp_path_factory.mktemp("acceptance")
    target = save_tokenizer(build_qwen3(root / "target"))
    prompts = write_samples(root / "prompts.jsonl", 12)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with open(root / "answers.jsonl", "w", encoding="utf-8") as stream:
        for line in prompts.read_text().splitlines():
            prompt = json.loads(line)["input_ids"][:8]
            ids = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0)[
                0
            ].tolist()
            mask = [0] * 8 + [1] * (len(ids) - 8)
            stream.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
    write_features(target, root / "answers.jsonl", root / "features", LAYERS)
    document = tiny_recipe(
        target,
        root / "run",
        data={"hidden_states_path": str(root / "features")},
        training={"max_steps": 60, "num_epochs": 20, "learning_rate": 5e-3, "num_anchors": 12},
    )
    (root / "recipe.yaml").write_text(json.dumps(document), encoding="utf-8")
    assert train(["--recipe", str(root / "recipe.yaml")]) == 0
    return root


def test_replay_is_what_real_decoding_does(world: Path) -> None:
    """Every prompt, decoded forward by forward against the target: the same answer, the same rounds."""
    from specforge_dspine.acceptance import frozen_draft

    draft = load_draft(world / "run" / "export" / "sglang")
    target = AutoModelForCausalLM.from_pretrained(world / "target", dtype=torch.float32).eval()
    head, embedding = target.lm_head.weight.detach(), target.model.embed_tokens.weight.detach()
    accepted = 0
    for each in (draft, untrained_like(draft, head)):
        model = frozen_draft(each, head, embedding)
        for file in sorted((world / "features").iterdir()):
            record = torch.load(file)
            ids, taps = record["input_ids"], record["hidden_states"][0]
            trace = replay(model, file.stem, ids, taps, 8)["refined"]
            answer, rounds = decode_live(model, target, LAYERS, ids[:8], len(ids) - 8, {EOS})
            assert answer == ids[8:].tolist(), "greedy decoding is lossless, whatever the draft"
            assert tuple(rounds) == trace.rounds
            accepted += sum(r.accepted for r in trace.rounds)
    assert accepted > 0, "a draft that never gets anything accepted proves little"


def test_rounds_walk_through_the_answer() -> None:
    assert accepted_prefix([5, 6, 7], [5, 6, 8]) == 2
    assert accepted_prefix([5, 6, 7], [5]) == 1
    trace = Trace("a", tuple(range(12)), 2, (Round(2, (3, 9, 9), 1), Round(4, (5, 6, 7), 3), Round(8, (1, 1, 1), 0)))
    assert trace.tokens == 9
    assert tau([trace]) == 3.0


def test_interval_covers_and_pairs() -> None:
    def trace(tokens: int, rounds: int) -> Trace:
        return Trace("a", tuple(range(tokens + 1)), 0, (Round(0, (), 0),) * rounds)

    better = [trace(30, 20 - i % 3) for i in range(40)]
    worse = [trace(30, 22 - i % 3) for i in range(40)]
    low, high = tau_interval(better)
    assert low < tau(better) < high
    low, high = tau_interval(better, worse)
    assert 0 < low < tau(better) - tau(worse) < high
    low, high = tau_interval(better, better)
    assert low == high == 0


def recomputed_tau(traces: list[dict]) -> float:  # type: ignore[type-arg]
    """τ from ids and proposals alone: nothing that the report itself counted is used."""
    tokens = rounds = 0
    for trace in traces:
        ids, anchor = trace["ids"], trace["prompt"]
        for entry in trace["rounds"]:
            assert entry["anchor"] == anchor
            accepted = 0
            while (
                accepted < len(entry["proposed"])
                and anchor + 1 + accepted < len(ids)
                and entry["proposed"][accepted] == ids[anchor + 1 + accepted]
            ):
                accepted += 1
            assert entry["accepted"] == accepted
            tokens += min(accepted + 1, len(ids) - 1 - anchor)
            rounds += 1
            anchor += accepted + 1
        assert anchor >= len(ids) - 1, "the rounds reach the answer's end"
    return tokens / rounds


def check_report(path: Path) -> dict:  # type: ignore[type-arg]
    content = json.loads(path.read_text(encoding="utf-8"))
    for name, entry in content["variants"].items():
        assert entry["tau"] == pytest.approx(recomputed_tau(content["traces"][name]), rel=1e-12), name
        assert entry["rounds"] == sum(len(trace["rounds"]) for trace in content["traces"][name])
    gain = content["variants"]["refined"]["tau"] - content["variants"]["unrefined"]["tau"]
    assert content["refinement_gain"] == pytest.approx(gain)
    low, high = content["refinement_gain_interval_95"]
    assert low <= gain <= high
    return content


def test_report_can_be_recomputed_from_its_traces(world: Path, tmp_path: Path) -> None:
    arguments = {
        "--draft": world / "run" / "export" / "specforge",
        "--target": world / "target",
        "--features": world / "features",
        "--run": world / "run",
        "--out": tmp_path,
        "--live": 2,
    }
    assert report([str(word) for pair in arguments.items() for word in pair]) == 0
    content = check_report(tmp_path / "report.json")
    assert content["prompts"] == 12 and content["decoded_live"] == 2
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"


def test_published_report_holds_what_the_readme_quotes() -> None:
    """The demo's report in the repository: enough prompts and rounds, and its figures follow from its traces."""
    content = check_report(PUBLISHED)
    assert content["prompts"] == len(content["traces"]["refined"]) >= 60
    assert content["variants"]["refined"]["rounds"] >= 1500
    readme = (PUBLISHED.parents[2] / "README.md").read_text(encoding="utf-8")
    for entry in content["variants"].values():
        assert f"{entry['tau']:.3f}" in readme
