"""Ablations: variants, statistics, the published page, and runs that are killed and continued to the same result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from specforge_dspine.ablate import report as ablation_report
from specforge_dspine.ablate.__main__ import main as ablate
from specforge_dspine.ablate.markdown import markdown
from specforge_dspine.ablate.runs import VariantRun
from specforge_dspine.ablate.statistics import (
    REVERSED,
    SHOWS,
    UNRESOLVED,
    Counts,
    Tau,
    count,
    differences,
    taus,
    verdict,
)
from specforge_dspine.ablate.variants import VARIANTS, claim_folder, parse_variants
from specforge_dspine.decoding.loop import Round, Trace
from specforge_dspine.training.recipe import load_recipe
from tests.support import ROOT
from tests.support.features import write_features, write_responses
from tests.support.reports import recomputed_tau
from tests.support.runs import assert_same_run, kill_group, metrics, wait_until
from tests.support.small import save_tokenizer, tiny_recipe
from tests.support.targets import build_qwen3

LAYERS = [0, 2, 4]
NAMES, SEEDS = ("full", "dflash"), (1, 2)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, features to train on, two sets of captured responses, and a recipe."""
    root = tmp_path_factory.mktemp("ablate")
    target = save_tokenizer(build_qwen3(root / "target"))
    for name, samples, seed in (("features", 12, 0), ("near", 4, 5), ("far", 3, 6)):
        responses = write_responses(target, root / f"{name}.jsonl", samples, tokens=20, seed=seed)
        write_features(target, responses, root / name, LAYERS)
    document = tiny_recipe(
        target,
        root / "unused",
        data={"hidden_states_path": str(root / "features")},
        training={"max_steps": 12, "total_steps": 12, "num_epochs": 100, "batch_size": 1, "save_interval": 3},
    )
    (root / "recipe.yaml").write_text(json.dumps(document), encoding="utf-8")
    return root


def words(toy: Path, out: Path, *extra: object, sets: tuple[str, ...] = ("near", "far")) -> list[str]:
    captured = [f"captured={toy / name}" for name in sets]
    fixed = ["--recipe", toy / "recipe.yaml", "--out", out, "--max-new-tokens", 16, "--sets", *captured]
    return [str(word) for word in (*fixed, *extra)]


def both(names: tuple[str, ...] = NAMES, seeds: tuple[int, ...] = SEEDS) -> tuple[object, ...]:
    return ("--variants", *names, "--seeds", *seeds)


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """The command in the background, leading a process group."""
    with open(log, "ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "specforge_dspine.ablate", *arguments],
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )


def finish(arguments: list[str], log: Path) -> str:
    """The command to its end; what it said."""
    process = start(arguments, log)
    try:
        assert process.wait(timeout=900) == 0, log.read_text(encoding="utf-8")
    finally:
        kill_group(process)
    return log.read_text(encoding="utf-8")


def traces(run: VariantRun) -> list[dict[str, Any]]:
    lines = (run.evaluation / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["trace"] for line in lines]


def logged(run: VariantRun) -> int:
    return len(metrics(run.run)) if (run.run / "metrics.jsonl").exists() else 0


def test_a_killed_ablation_continues_to_the_same_result(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, single = tmp_path / "out", tmp_path / "single"
    runs = {(name, seed): VariantRun(out, name, seed) for name in NAMES for seed in SEEDS}
    killed = runs["full", 1]
    process = start(words(toy, out, *both()), tmp_path / "killed.log")
    try:
        assert wait_until(lambda: logged(killed) >= 5, process, 600)
    finally:
        kill_group(process)
    assert not killed.trained and 5 <= logged(killed) < 12, "killed in the middle"

    said = finish(words(toy, out, *both()), tmp_path / "continued.log")
    assert "--resume" in said and "8 of 8 done, about 0 min left" in said
    finish(words(toy, single, *both(("full",), (1,))), tmp_path / "single.log")
    undisturbed = VariantRun(single, "full", 1)
    assert_same_run(killed.run, undisturbed.run)
    assert traces(killed) == traces(undisturbed)

    report = json.loads((out / "ablation.json").read_text(encoding="utf-8"))
    for name in NAMES:
        assert report["variants"][name]["seeds"] == list(SEEDS)
        for index, seed in enumerate(SEEDS):
            own = traces(runs[name, seed])
            of_sets = [recomputed_tau(own[:4]), recomputed_tau(own[4:])]
            mean = report["variants"][name]["tau_mean_over_sets"]["per_seed"][index]
            assert mean == pytest.approx(np.mean(of_sets), rel=1e-12)
    assert report["variants"]["full"]["steps"] == 12
    assert [(each["above"], each["below"]) for each in report["orderings"]] == [("full", "dflash")]
    assert "input_ids" not in json.dumps(report) and "proposed" not in json.dumps(report)
    page = (out / "ablation.md").read_text(encoding="utf-8")
    assert "full > dflash" in page and "paper, Qwen3-8B, other data and budget" in page
    assert report["orderings"][0]["verdict"] in page
    for picture in ("curves", "positions", "sets", "cost"):
        assert (out / f"{picture}.png").read_bytes()[:4] == b"\x89PNG" and f"{picture}.png" in page

    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and path.parent != out}
    again = finish(words(toy, out, *both()), tmp_path / "again.log")
    assert "8 of 8 parts are done already" in again
    assert before == {path: path.stat().st_mtime_ns for path in before}, "nothing was made again"

    for extra, named in (
        (("--limit", 1), "sets.near.prompts was 4 and is 1"),
        (("--max-new-tokens", 8), "max_new_tokens was 16 and is 8"),
        (("--recipe", other_recipe(toy, tmp_path, "training", learning_rate=1e-4)), "training.learning_rate was"),
        (("--recipe", other_recipe(toy, tmp_path, "dspine", top_k=3)), "variants.full.top_k was 4 and is 3"),
        (("--recipe", other_recipe(toy, tmp_path, "data", hidden_states_path=str(toy / "near"))), "data was 12"),
        (("--recipe", other_recipe(toy, tmp_path, "model", target_model_path=other_target(toy))), "target was"),
    ):
        assert ablate(words(toy, out, *both(), *extra)) == 2
        message = capsys.readouterr().err
        assert named in message and f"{out} holds an ablation of other inputs" in message
    (killed.evaluation / "result.json").unlink()
    assert ablation_report.main(["--ablation", str(out), "--out", str(tmp_path / "part")]) == 0
    assert "left out: full, seed 1." in (tmp_path / "part" / "ablation.md").read_text(encoding="utf-8")
    part = json.loads((tmp_path / "part" / "ablation.json").read_text(encoding="utf-8"))
    assert part["orderings"][0]["seeds"] == [2], "compared on the seeds that both have"


def other_recipe(toy: Path, folder: Path, section: str, **values: object) -> Path:
    document = json.loads((toy / "recipe.yaml").read_text(encoding="utf-8"))
    document[section] |= values
    path = folder / f"{section}.yaml"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def other_target(folder: Path) -> str:
    return str(save_tokenizer(build_qwen3(folder / "other", seed=1)))


def test_a_failing_run_is_reported_with_its_log(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = ["--variants", "broken:dspine.transfer_rank=4096", "--seeds", "1"]
    assert ablate(words(toy, tmp_path / "out", *variants)) == 1
    log = tmp_path / "out" / "broken" / "seed1" / "train.log"
    assert f"ended with status 2; {log} ends with: error:" in capsys.readouterr().err


def test_unusable_ablations_are_reported(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for extra, named in (
        (["--variants", "complete"], "variant 'complete' is unknown: use full, no-refinement"),
        (["--variants", "x:dspine.topk=3"], "dspine.topk: unknown key; did you mean 'top_k'?"),
        (
            ["--variants", "x:training.learning_rate=1e-4"],
            "training.learning_rate=1e-4 is not in the dspine section",
        ),
        (["--variants", "full", "x:dspine.injection=on"], "variants full and x are the same training"),
        (["--seeds", "1", "2", "1"], "a seed occurs twice"),
        (["--sets", f"captured={toy / 'none'}"], "there is no"),
    ):
        assert ablate(words(toy, tmp_path / "out", *extra)) == 2
        assert named in capsys.readouterr().err
    assert ablation_report.main(["--ablation", str(tmp_path)]) == 2
    assert "is it the --out of specforge_dspine.ablate?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_variants_may_be_added_and_not_changed(tmp_path: Path) -> None:
    inputs: dict[str, Any] = {"recipe": {"training": {"max_steps": 3}}, "variants": {"full": {"top_k": 4}}}
    claim_folder(tmp_path, inputs)
    claim_folder(tmp_path, inputs | {"variants": {"own": {"top_k": 3}}})
    held = json.loads((tmp_path / "inputs.json").read_text(encoding="utf-8"))
    assert held["variants"] == {"full": {"top_k": 4}, "own": {"top_k": 3}}
    with pytest.raises(ValueError, match=r"variants\.own\.top_k was 3 and is 2"):
        claim_folder(tmp_path, inputs | {"variants": {"own": {"top_k": 2}}})
    assert json.loads((tmp_path / "inputs.json").read_text(encoding="utf-8")) == held


def test_the_published_page_is_what_its_numbers_give() -> None:
    folder = ROOT / "docs" / "results" / "ablation"
    report = json.loads((folder / "ablation.json").read_text(encoding="utf-8"))
    figures = [f"{name}.png" for name in ("curves", "positions", "sets", "cost")]
    assert markdown(report, figures) == (folder / "ablation.md").read_text(encoding="utf-8")
    assert all((folder / name).exists() for name in figures)


WITHOUT_INJECTION = {"injection": False, "refinement": False, "curriculum": False}
BIDIRECTIONAL = WITHOUT_INJECTION | {"causal": False}


@pytest.mark.parametrize(
    ("name", "differing"),
    [
        ("full", {}),
        ("no-refinement", {"refinement": False}),
        ("no-injection", WITHOUT_INJECTION),
        ("dflash", BIDIRECTIONAL | {"alignment": "off", "ce_weight": 1.0}),
        ("dflash-none", BIDIRECTIONAL | {"alignment": "off"}),
        ("dflash-ce", BIDIRECTIONAL | {"alignment": "ce"}),
        ("dflash-cosine", BIDIRECTIONAL),
    ],
)
def test_a_variant_differs_from_the_recipe_in_its_fields_alone(toy: Path, name: str, differing: Any) -> None:
    full, other = (load_recipe(toy / "recipe.yaml", VARIANTS[each]) for each in ("full", name))
    before, after = (each.resolved()["dspine"] for each in (full, other))
    assert {key: value for key, value in after.items() if value != before[key]} == differing
    assert other.specforge_config == full.specforge_config and after.keys() == before.keys()


def test_the_baseline_is_the_dflash_recipes() -> None:
    folder = ROOT / "recipes"
    variant = load_recipe(folder / "smollm2_cpu.yaml", VARIANTS["dflash"])
    assert variant.dspine == load_recipe(folder / "smollm2_cpu_dflash.yaml").dspine


def test_the_ablation_recipe_is_the_demos_trained_offline() -> None:
    folder = ROOT / "recipes"
    ours, demo = (load_recipe(folder / name) for name in ("smollm2_cpu_ablation.yaml", "smollm2_cpu.yaml"))
    assert (
        ours.dspine == demo.dspine
        and ours.specforge_config.model == demo.specforge_config.model
        and ours.stream is None
    )
    document = yaml.safe_load((folder / "smollm2_cpu_ablation.yaml").read_text(encoding="utf-8"))
    assert document["data"]["hidden_states_path"] == "runs/ablation/data/train", "where make ablation captures"


def test_custom_variants() -> None:
    own = parse_variants(["full", "small:dspine.message_size=4,dspine.target_layer_ids=[0,2],dspine.top_k=2"])
    overrides = ("dspine.message_size=4", "dspine.target_layer_ids=[0,2]", "dspine.top_k=2")
    assert own == {"full": VARIANTS["full"], "small": overrides}
    for given, message in (
        (["full", "full"], "variant 'full' occurs twice"),
        (["full:dspine.top_k=2"], "needs a new name"),
        (["a/b:dspine.top_k=2"], "needs a new name"),
        (["a:"], "and overrides"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_variants(given)


def test_statistics_by_hand() -> None:
    """Two seeds, two prompts of one set and one of another."""
    near = np.array([[[30, 10], [20, 20]], [[30, 20], [40, 20]]], dtype=float)
    far = np.array([[[12, 8]], [[9, 9]]], dtype=float)
    found = taus({"near": near, "far": far})
    assert found["near"].per_seed == pytest.approx([50 / 30, 70 / 40])
    assert found["far"].per_seed == pytest.approx([1.5, 1.0])
    assert found[""].per_seed == pytest.approx([(50 / 30 + 1.5) / 2, (70 / 40 + 1.0) / 2])
    assert found[""].value == pytest.approx(np.mean(found[""].per_seed))
    assert found["far"].interval == pytest.approx((1.0, 1.5)), "its only prompt is always drawn; both seeds are not"

    # One seed and two equally long prompts: draws of them are (a, a), (a, b) twice, (b, b).
    single = taus({"near": np.array([[[20, 10], [10, 10]]], dtype=float)})
    assert single["near"].value == 1.5 and single["near"].interval == (1.0, 2.0)


def test_differences_are_paired() -> None:
    """Prompts and seeds that differ widely, and every one of them the same 0.2 better: nothing is left to chance."""
    generator = np.random.default_rng(1)
    rounds = generator.integers(20, 60, size=(3, 9, 1)).astype(float)
    below: Counts = {"set": np.concatenate([rounds * generator.uniform(1, 3, size=(3, 9, 1)), rounds], axis=2)}
    above: Counts = {"set": below["set"] + np.concatenate([0.2 * rounds, 0 * rounds], axis=2)}
    assert np.ptp(taus(below)["set"].interval) > 0.2
    found = differences(above, below)[""]
    assert found.value == pytest.approx(0.2) and found.interval == pytest.approx((0.2, 0.2))
    assert found.per_seed == pytest.approx([0.2] * 3)
    assert verdict(found) == SHOWS and verdict(differences(below, above)[""]) == REVERSED


def test_noise_is_not_resolved() -> None:
    generator = np.random.default_rng(2)
    pair: list[Counts] = [
        {"set": np.stack([generator.normal(60, 10, size=(3, 30)), np.full((3, 30), 50.0)], axis=2)} for _ in range(2)
    ]
    assert verdict(differences(*pair)[""]) == UNRESOLVED


def test_few_seeds_that_differ_by_chance_rarely_show_anything() -> None:
    """Noise of the seeds alone: both kinds of false verdicts together stay near 5 %, with three seeds too."""
    draw, wrong = np.random.default_rng(0), 0
    for _ in range(300):
        sums = []
        for _ in range(2):
            tokens = 40 * (1.2 + draw.normal(0, 0.03, (3, 1)) + np.zeros((3, 24)))
            sums.append({"set": np.stack([tokens, np.full((3, 24), 40.0)], axis=-1)})
        wrong += verdict(differences(*sums)[""]) != UNRESOLVED
    assert wrong < 0.09 * 300


def test_variants_on_other_prompts_are_not_compared() -> None:
    with pytest.raises(ValueError, match="different prompts or seeds"):
        differences({"set": np.ones((3, 4, 2))}, {"set": np.ones((3, 5, 2))})


def test_responses_without_a_round_do_not_count() -> None:
    nothing, some = Trace("a", (5, 6), 1, ()), Trace("b", (5, 6, 7), 1, (Round(1, (7,), 1),))
    assert count([[nothing, some]]).tolist() == [[[1, 1]]]
    with pytest.raises(ValueError, match="no round"):
        count([[nothing]])


def test_the_verdict_wants_both_intervals() -> None:
    assert verdict(Tau(0.1, (0.02, 0.2), (0.09, 0.1, 0.11))) == SHOWS
    assert verdict(Tau(-0.1, (-0.2, -0.02), (-0.09, -0.1, -0.11))) == REVERSED
    assert verdict(Tau(0.1, (-0.01, 0.2), (0.09, 0.1, 0.11))) == UNRESOLVED
    assert verdict(Tau(0.1, (0.02, 0.2), (0.05, 0.1, 0.15))) == UNRESOLVED
    assert verdict(Tau(0.1, (0.02, 0.2), (-0.01, 0.1, 0.2))) == UNRESOLVED
    assert verdict(Tau(-0.1, (-0.2, -0.02), (0.01, -0.1, -0.2))) == UNRESOLVED
    assert verdict(Tau(0.0, (0.0, 0.0), (0.0, 0.0))) == UNRESOLVED
    assert verdict(Tau(0.1, (0.02, 0.2), (0.1,))) == UNRESOLVED


def test_counts_come_from_rounds_and_by_prompt() -> None:
    def response(name: str, tokens: int, rounds: int) -> Trace:
        return Trace(name, tuple(range(3 + tokens)), 2, tuple(Round(2, (1,), 0) for _ in range(rounds)))

    first = [response("b", 5, 4), response("a", 7, 3), response("a", 1, 1)]  # two turns of a conversation
    second = [response("a", 6, 2), response("b", 3, 3)]
    assert count([first, second]).tolist() == [[[8, 4], [5, 4]], [[6, 2], [3, 3]]]
    with pytest.raises(ValueError, match="hold different prompts"):
        count([first, second[:1]])


def test_curves_are_means_over_stretches() -> None:
    lines = [{"step": float(k), "ce": float(k)} for k in range(1, 41)]
    assert ablation_report.curve(lines, "ce") == {str(k): k - 0.5 for k in range(2, 41, 2)}
    assert ablation_report.curve(lines[4:6], "ce") == {"5": 5.0, "6": 6.0}
