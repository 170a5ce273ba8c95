"""The benchmark runs every section, and the objective's memory is bounded by its chunk. Nothing is timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from specforge_dspine.bench import checks
from specforge_dspine.bench.__main__ import SECTIONS, main
from specforge_dspine.bench.decode_timing import PIECES, DecodingBench
from specforge_dspine.bench.dispatch_modes import Allocations, OperationTimes
from specforge_dspine.bench.models import SIZES, Bench
from specforge_dspine.bench.section import GOALS
from specforge_dspine.bench.step_timing import draft_output, objective_peak
from specforge_dspine.objective.training_model import DSpineTrainingModel
from tests.support.drafts import make_batch, make_blocks, make_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a dry run writes; its table is under "table"."""
    out = tmp_path_factory.mktemp("bench") / "deep" / "bench.json"
    command = [sys.executable, "-m", "specforge_dspine.bench", "--device", "cuda", "--size", "qwen3_8b"]
    done = subprocess.run([*command, "--dry-run", "--out", str(out)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found | {"table": done.stdout}


def test_a_dry_run_fills_every_section(report: dict[str, Any]) -> None:
    assert list(report["sections"]) == list(SECTIONS)
    for name, section in report["sections"].items():
        assert section["status"] == "ok", name
        assert section["lines"], name
        for line in section["lines"]:
            assert line["value"] > 0, line
            assert line["quantity"] in report["table"]
    assert report["machine"]["cpu"] and report["machine"]["torch"] == torch.__version__


def values(report: dict[str, Any], section: str) -> dict[str, float]:
    return {line["quantity"]: line["value"] for line in report["sections"][section]["lines"]}


def test_the_injection_has_the_papers_parameters_at_qwen3_8b(report: dict[str, Any]) -> None:
    assert values(report, "shapes")["injection parameters"] == 33_030_656
    assert report["sections"]["shapes"]["raw"] == {
        "hidden": [1, 512, 16, 4096],
        "pre_injection": [1, 512, 16, 4096],
        "features": [5, 1, 512, 16, 1024],
    }


def test_every_step_is_compared_and_every_round_kept(report: dict[str, Any]) -> None:
    seconds = report["sections"]["steps"]["raw"]["seconds"]
    assert set(seconds) == {"DSpine", "DFlash", "DSpark", "DSpark with heads"}
    assert {len(rounds) for rounds in seconds.values()} == {2}
    quantities = values(report, "steps")
    assert {f"DSpine ÷ {name}" for name in seconds if name != "DSpine"} < quantities.keys()
    ours, theirs = seconds["DSpine"], seconds["DFlash"]
    assert quantities["DSpine ÷ DFlash"] == pytest.approx(sum(a / b for a, b in zip(ours, theirs, strict=True)) / 2)
    assert set(report["goals"]) == set(GOALS)
    assert report["table"].count("goal ≤") == len(GOALS)


def test_the_pieces_tell_every_part_of_the_objective(report: dict[str, Any]) -> None:
    kinds = report["sections"]["time"]["raw"]["objective"]
    assert {"vocabulary products", "vocabulary softmaxes and sums", "refinement", "alignment"} < kinds.keys()
    assert values(report, "time")["supervised positions"] <= 64 * 4


def test_a_round_of_decoding_is_split_and_the_cache_compared(report: dict[str, Any]) -> None:
    quantities = values(report, "decoding")
    pieces = report["sections"]["decoding"]["raw"]["pieces"]
    assert len(pieces) == 2 and set(pieces[0]) == {*PIECES, "stepwise"}
    assert quantities["round"] == pytest.approx(sum(sum(each[name] for name in PIECES) for each in pieces) / 2)
    ratios = [each["stepwise"] / (each["cache"] + each["walk"]) for each in pieces]
    assert quantities["step by step ÷ cache and walk"] == pytest.approx(sum(ratios) / 2)


def test_rounds_of_the_benchmark_start_from_the_same_context() -> None:
    bench = Bench(SIZES["toy"], CPU, "sdpa")
    bench.build_transfer_space()
    rounds = DecodingBench(bench)
    for _ in range(3):
        rounds.round_in_pieces()
        assert rounds.drafter.context.get_seq_length() == SIZES["toy"].sequence
        assert rounds.target.cache.get_seq_length() == rounds.target.length == SIZES["toy"].sequence


def test_a_used_up_budget_stops_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "b.json"
    assert main(["--dry-run", "--budget-s", "0", "--out", str(out)]) == 0
    sections = json.loads(out.read_text(encoding="utf-8"))["sections"]
    assert {section["status"] for section in sections.values()} == {"not run: out of time"}
    assert "steps: not run: out of time" in capsys.readouterr().out


def test_a_section_that_fails_is_named_and_the_next_ones_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "VECTORS", tmp_path / "none")
    out = tmp_path / "b.json"
    assert main(["--dry-run", "--out", str(out)]) == 1
    sections = json.loads(out.read_text(encoding="utf-8"))["sections"]
    assert sections["conformance"]["status"].startswith("failed: FileNotFoundError")
    assert {section["status"] for name, section in sections.items() if name != "conformance"} == {"ok"}


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--device", "cuda", "--out", str(tmp_path / "b.json")]) == 2
    assert not (tmp_path / "b.json").exists()


def largest_tensor(model: DSpineTrainingModel, inputs: dict[str, Any], chunk_blocks: int, *, ahead: bool) -> int:
    """Elements of the largest tensor that a forward and backward allocates, the draft's included, or a look ahead."""
    model.objective_chunk_blocks = chunk_blocks
    model.zero_grad(set_to_none=True)
    with Allocations() as allocations:
        if ahead:
            model(**inputs, window_reduce=None)
        else:
            model(**inputs).numerator.backward()
    return allocations.largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"alignment": "ce"}, {"refinement": False}, {"ce_weight": 1.0}], ids=str)
@pytest.mark.parametrize("ahead", [False, True], ids=["step", "look ahead"])
def test_no_tensor_is_larger_than_the_chunk_allows(dtype: torch.dtype, options: dict[str, Any], ahead: bool) -> None:
    """V is far above every other size, so that only logits and what is made of them could be that large."""
    vocab, proposals = 20_000, 4
    model = make_model(dtype=dtype, vocab=vocab, **options)
    model.normalization_scope = "window"
    inputs = make_batch(length=40, dtype=dtype) | {"blocks": make_blocks([list(range(4, 16))] * 2), "beta": 0.3}
    for blocks in (1, 3):
        assert largest_tensor(model, inputs, blocks, ahead=ahead) == blocks * proposals * vocab
    assert largest_tensor(model, inputs, 0, ahead=ahead) > 3 * proposals * vocab, "all at once must exceed it"


def test_64_chunks_take_an_eighth_of_the_memory_at_most() -> None:
    bench = Bench(SIZES["toy"], CPU, "sdpa")
    inputs = bench.inputs()
    output = draft_output(bench.model, inputs)
    peaks = {}
    for chunk_blocks in (0, 1, 32):  # of 64 blocks
        bench.model.objective_chunk_blocks = chunk_blocks
        peaks[chunk_blocks] = objective_peak(bench, inputs, output)
    assert peaks[1] <= peaks[0] / 8 < peaks[32] < peaks[0]


def test_allocations_count_storages_while_they_live() -> None:
    before = torch.ones(1000)
    with Allocations() as allocations:
        first = before + 1  # 4000 bytes
        view = first[:500].view(-1, 5)
        view.mul_(2)
        assert (allocations.live, allocations.peak) == (4000, 4000)
        del first
        assert allocations.live == 4000, "a view keeps it"
        doubled = view.double()  # another 4000
        del view
        assert (allocations.live, allocations.peak) == (4000, 8000)
        assert before.t().data_ptr() == before.data_ptr()
    assert allocations.largest == 1000
    del doubled
    assert allocations.live == 4000, "what outlives the mode is not watched any more"


def test_the_backward_pass_and_recomputation_are_watched() -> None:
    weight = torch.ones(8, 8, requires_grad=True)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).exp().sum()

    names: list[str] = []
    with OperationTimes(lambda name, _shapes: names.append(name) or name, lambda: None) as clock:  # type: ignore[func-returns-value]
        checkpoint(twice, torch.ones(2, 8), use_reentrant=False).backward()
    assert names.count("aten.exp") == 2, "once in the forward, once recomputed"
    assert names.count("aten.mm") == 3, "and once for the weight's gradient"
    assert set(clock.seconds) == set(names) and min(clock.seconds.values()) > 0
