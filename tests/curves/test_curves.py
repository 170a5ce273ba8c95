"""Training still runs along its recorded curves, and the comparison sees what it is there to see."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from specforge_dspine.curves import runs, toy_target
from specforge_dspine.curves.__main__ import main
from specforge_dspine.curves.compare import Curve, Deviation, agree, compare, compare_part, draw_curve, tolerance_of
from specforge_dspine.curves.runs import (
    CURVES,
    Spec,
    check_group,
    load_reference,
    run_curve,
    save_reference,
    toy_data_in,
)

REFERENCES = Path(__file__).parent
STEPS = 72


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the curves' toy data."""
    root = tmp_path_factory.mktemp("curves")
    toy_data_in(root)
    return root


@pytest.mark.parametrize("name", CURVES)
def test_training_follows_its_reference(name: str, workdir: Path) -> None:
    deviations = compare(load_reference(name, REFERENCES), run_curve(CURVES[name], workdir))
    assert not deviations, "\n".join(map(str, deviations))


@pytest.mark.parametrize("name", CURVES)
def test_a_reference_says_what_made_it_and_passes_warmup_and_curriculum(name: str) -> None:
    content = json.loads((REFERENCES / f"{name}.json").read_text(encoding="utf-8"))
    assert content["name"] == name and content["seed"] == content["recipe"]["training"]["seed"]
    assert {"torch", "specforge", "transformers", "specforge_dspine"} == content["versions"].keys()
    assert content["steps"] >= 60 and all(len(values) == content["steps"] for values in content["parts"].values())
    assert int(content["recipe"]["training"]["warmup_ratio"] * content["steps"]) >= 4
    assert content["recipe"]["dspine"]["replacement_end_ratio"] * content["steps"] < content["steps"] / 2
    loss = content["parts"]["ce"]
    fall = 0.8 if content["recipe"]["dspine"]["injection"] else 0.85  # the text is told by the predecessor
    assert sum(loss[-12:]) < fall * sum(loss[:12]), "nothing is learned: the curve would show nothing"
    text = (REFERENCES / f"{name}.json").read_text(encoding="utf-8")
    assert '"/' not in text, "a path of a machine"


def test_the_draft_learns_and_refinement_adds() -> None:
    parts = load_reference("dspine", REFERENCES).parts
    late = {part: sum(values[-24:]) / 24 for part, values in parts.items()}
    assert late["refined_accuracy"] > 1.3 * late["accuracy"] > 1.3 * 0.1
    assert late["refined_tau"] > late["tau"] > 1.2
    assert max(parts["replaced_share"][:12]) > 0 and set(parts["replaced_share"][24:]) == {0.0}


def make_curve(**changed: list[float]) -> Curve:
    """A made-up curve: a loss that falls, an accuracy, and a part that is known exactly."""
    parts = {
        "loss": [10.0 - 0.05 * i for i in range(STEPS)],
        "accuracy": [0.2 + 0.001 * i for i in range(STEPS)],
        "rows": [80.0 + i % 7 for i in range(STEPS)],
    }
    return Curve("made", {}, parts | changed)


def shifted(part: str, by: float, *, start: int = 0, stop: int = STEPS, alternate: bool = False) -> Curve:
    """``make_curve`` with ``by``, in units of the part's typical size, added to the steps from ``start`` on."""
    values = make_curve().parts[part]
    scale = math.sqrt(sum(value * value for value in values) / STEPS)
    sign = [(-1) ** i if alternate else 1 for i in range(STEPS)]
    changed = [v + by * scale * sign[i] * (start <= i < stop) for i, v in enumerate(values)]
    return make_curve(**{part: changed})


def test_equal_curves_agree() -> None:
    assert compare(make_curve(), make_curve()) == []


def test_a_single_spike_is_absolute_and_named_by_part_and_step() -> None:
    found = compare(make_curve(), shifted("loss", 0.015, start=40, stop=41))
    assert [(d.part, d.kind, d.step) for d in found] == [("loss", "absolute", 41)]
    assert found[0].size == pytest.approx(0.015, rel=1e-6)
    assert "loss: absolute 1.5e-02 (allowed 1e-02), from step 41" in str(found[0])


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_small_constant_offset_is_drift(sign: int) -> None:
    """Far below the absolute tolerance at every step."""
    offset = 1.5 * tolerance_of("loss").drift
    assert offset < tolerance_of("loss").absolute / 5
    found = compare(make_curve(), shifted("loss", sign * offset, start=1))
    assert [(d.part, d.kind, d.step) for d in found] == [("loss", "drift", 2)]


def test_scatter_about_zero_is_no_drift() -> None:
    assert compare(make_curve(), shifted("loss", 8e-3, start=1, alternate=True)) == []


def test_late_drift_shows_in_the_last_third_though_the_whole_runs_mean_is_small() -> None:
    offset = 2 * tolerance_of("loss").drift
    found = compare(make_curve(), shifted("loss", offset, start=52))
    assert [(d.part, d.kind, d.step) for d in found] == [("loss", "drift", 53)]
    assert offset * 20 / STEPS < tolerance_of("loss").drift


def test_the_first_step_allows_one_forwards_rounding_only() -> None:
    assert compare(make_curve(), shifted("loss", 5e-6, stop=1)) == []
    assert [d.step for d in compare(make_curve(), shifted("loss", 2e-5, stop=1))] == [1]


def test_one_flipped_row_is_nothing_but_rows_that_keep_flipping_are() -> None:
    scale = math.sqrt(sum(v * v for v in make_curve().parts["accuracy"]) / STEPS)
    row = 0.01 / scale
    assert compare(make_curve(), shifted("accuracy", row, start=30, stop=31)) == []
    assert {d.kind for d in compare(make_curve(), shifted("accuracy", row, start=1))} == {"drift"}


def test_a_count_must_be_equal() -> None:
    found = compare(make_curve(), shifted("rows", 1e-4, start=9, stop=10))
    assert [(d.part, d.step) for d in found] == [("rows", 10), ("rows", 10)]


def test_nan_missing_parts_and_missing_steps_deviate() -> None:
    values = make_curve().parts["loss"]
    found = compare(make_curve(), make_curve(loss=[*values[:20], math.nan, *values[21:]]))
    assert found[0] == Deviation("loss", "absolute", 21, math.inf, 1e-2)
    found = compare(make_curve(), make_curve(loss=values[:50]))
    assert [(d.kind, d.step) for d in found] == [("missing", 51)]
    without = make_curve()
    del without.parts["rows"]
    assert [(d.part, d.kind, d.step) for d in compare(make_curve(), without)] == [("rows", "missing", 1)]


def test_deviations_come_in_the_order_of_their_steps() -> None:
    a, b = shifted("loss", 0.1, start=30), shifted("accuracy", 2.0, start=10)
    both = make_curve(loss=a.parts["loss"], accuracy=b.parts["accuracy"])
    steps = [d.step for d in compare(make_curve(), both)]
    assert steps == sorted(steps) and steps[0] == 11


def test_a_part_that_is_always_zero_has_a_scale_of_one() -> None:
    zero = [0.0] * STEPS
    assert compare_part("loss", zero) == []
    assert [d.step for d in compare(make_curve(loss=zero), make_curve(loss=[*zero[:-1], 0.5]))] == [STEPS, STEPS]


def test_a_group_is_held_to_its_first_member() -> None:
    group = {"a": make_curve(), "b": make_curve(), "c": shifted("loss", 3e-5, start=6, stop=8)}
    assert agree({name: group[name] for name in "ab"}, 1e-5) == []
    found = agree(group, 1e-5)
    assert [(d.part, d.kind, d.step) for d in found] == [("loss (c)", "absolute", 7)]


def test_a_reference_survives_writing_and_reading(tmp_path: Path) -> None:
    recipe = {"training": {"seed": 3}}
    curve = Curve("made", recipe, {"loss": [1 / 3, 2e-9 / 3, 12345.678912], "rows": [80.0, 81.0, 82.0]})
    path = save_reference(curve, tmp_path / "new")
    again = load_reference("made", tmp_path / "new")
    assert again.recipe == recipe and again.parts["loss"] == [0.33333333, 6.6666667e-10, 12345.679]
    assert compare(curve, again) == []
    assert sum("loss" in line for line in path.read_text().splitlines()) == 1
    assert list((tmp_path / "new").iterdir()) == [path]


def test_picture_of_a_deviation(tmp_path: Path) -> None:
    curve = shifted("loss", 0.1, start=30)
    draw_curve(tmp_path / "made.png", make_curve(), curve, compare(make_curve(), curve))
    assert (tmp_path / "made.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["made.png"]


def test_check_says_what_to_do_without_a_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--only", "dspine", "--dir", str(tmp_path)]) == 2
    advice = "record it with python -m specforge_dspine.curves record --only dspine"
    assert advice in capsys.readouterr().err
    (tmp_path / "dspine.json").write_text("{", encoding="utf-8")
    assert main(["check", "--only", "dspine", "--dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "dspine.json is not JSON" in error and advice in error
    assert main(["check", "--only", "dspin", "--dir", str(tmp_path)]) == 2
    assert "--only dspin: the curves are dspine, no_injection" in capsys.readouterr().err


def test_check_names_part_and_step_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line on a run whose α is another than the reference's; a few steps are enough."""
    short = ("training.max_steps=6", "training.total_steps=72")
    monkeypatch.setitem(CURVES, "dspine", Spec("dspine", short))
    assert main(["record", "--only", "dspine", "--dir", str(tmp_path)]) == 0
    assert main(["check", "--only", "dspine", "--dir", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert "ok   dspine: 6 steps" in capsys.readouterr().out and not (tmp_path / "out").exists()
    monkeypatch.setitem(CURVES, "dspine", Spec("dspine", (*short, "dspine.ce_weight=0.12")))
    assert main(["check", "--only", "dspine", "--dir", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    output = capsys.readouterr().out
    assert "MISMATCH dspine" in output and "loss: absolute" in output and "from step 1" in output
    assert "dspine.ce_weight: recorded with 0.1, now 0.12" in output
    assert (tmp_path / "out" / "dspine.png").exists()
    assert main(["plot", "--only", "dspine", "--dir", str(tmp_path), "--out", str(tmp_path / "plot")]) == 0
    assert (tmp_path / "plot" / "dspine.png").exists()


def test_runs_repeat_bit_for_bit_in_one_process_and_leave_its_threads_alone(workdir: Path) -> None:
    spec = Spec("short", ("training.max_steps=4", "training.total_steps=72"))
    torch.manual_seed(5)
    first = run_curve(spec, workdir)
    torch.manual_seed(6)
    assert run_curve(spec, workdir).parts == first.parts
    assert torch.get_num_threads() == 1  # conftest's


def test_a_patched_function_is_used_by_the_next_run_and_by_it_alone(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the transfer space nor the toy target's states come from a cache of another run."""
    from specforge_dspine.modeling import transfer_space as transfer
    from specforge_dspine.training import specforge_algorithm as registration

    spec = Spec("short", ("training.max_steps=2", "training.total_steps=72"))
    plain = run_curve(spec, workdir)
    with monkeypatch.context() as patch:

        def uncached(head: torch.Tensor, rank: int, _cache: object) -> transfer.TransferSpace:
            space = transfer.build_transfer_space(head, rank)
            return space._replace(codes=space.codes.roll(1, 0))

        patch.setattr(registration, "cached_transfer_space", uncached)
        assert run_curve(spec, workdir).parts["align_0"] != plain.parts["align_0"]
    with monkeypatch.context() as patch:
        original = toy_target.captured_states
        patch.setattr(toy_target, "captured_states", lambda *a: tuple(2 * x for x in original(*a)))
        assert run_curve(spec, tmp_path).parts["l1"] != plain.parts["l1"]
    assert run_curve(spec, workdir).parts == plain.parts


def test_the_toy_target_prefers_the_chain(workdir: Path) -> None:
    """The teacher puts its mass on the two successors, depends a little on more than the last word, and needs the
    final norm."""
    model, successors = toy_target.build_target(toy_target.SEED)
    text = toy_target.draw_text(successors, toy_target.SEED)
    ids = torch.tensor(max((sample["input_ids"] for sample in text), key=len))
    with torch.no_grad():
        _, last = toy_target.captured_states(model, ids, toy_target.TAPS)
        p = (last[0] @ model.lm_head.weight.T).softmax(dim=-1)
        alone = (
            toy_target.captured_states(model, ids[-1:], toy_target.TAPS)[1][0, 0] @ model.lm_head.weight.T
        ).softmax(-1)
        raw = model.model(ids[None], output_hidden_states=True)
        logits = model(ids[None]).logits[0]
    first, second = (p.gather(1, successors[row, ids][:, None]).mean() for row in (0, 1))
    assert first > 0.4 > second > 0.1
    assert 0.02 < (p[-1] - alone).abs().sum() < 1.2
    assert torch.allclose(logits.softmax(-1), p, atol=1e-5)
    assert (raw.last_hidden_state - last).abs().max() == 0


def test_the_toy_samples_vary(workdir: Path) -> None:
    """Prompts, holes, short samples; some rows are padding and the first of them is the mask."""
    _, successors = toy_target.build_target(toy_target.SEED)
    samples = toy_target.draw_text(successors, toy_target.SEED)
    lengths = {len(sample["input_ids"]) for sample in samples}
    assert min(lengths) < 12 and len(lengths) > 8
    assert all(sample["loss_mask"][:2] == [0, 0] for sample in samples)
    holes = [sum(a < b for a, b in zip(s["loss_mask"], s["loss_mask"][1:], strict=False)) for s in samples]
    assert 3 < sum(count == 2 for count in holes) < len(samples) / 2
    assert len(list((workdir / "toy_data" / "features").glob("*.ckpt"))) == len(samples) == toy_target.SAMPLES
    tokenizer = AutoTokenizer.from_pretrained(workdir / "toy_data" / "target")
    assert len(tokenizer) == toy_target.ENTRIES < toy_target.VOCAB
    assert max(max(sample["input_ids"]) for sample in samples) < toy_target.ENTRIES
    assert runs.recipe_of(CURVES["dspine"], workdir / "toy_data", workdir).dspine.replacement_layers == 2


def test_chunks_do_not_change_the_curve(workdir: Path) -> None:
    assert check_group("chunks", workdir) == []


@pytest.mark.ranks
def test_how_a_window_is_split_does_not_change_the_curve(workdir: Path) -> None:
    assert check_group("window", workdir) == []
