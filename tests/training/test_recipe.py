"""Recipes: every wrong key, value and contradiction is refused by name, on the command line with one line and 2."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from specforge_dspine import train
from specforge_dspine.train import main
from specforge_dspine.training.recipe import NOT_READ, check_recipe, load_recipe, read_document
from specforge_dspine.utils.errors import RecipeError, RunError
from tests.support import ROOT
from tests.support.small import save_tokenizer, tiny_recipe, write_samples
from tests.support.targets import build_qwen3

SECTIONS = [section for section in NOT_READ if section]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def streamed(**sections: dict[str, Any]) -> dict[str, Any]:
    """A streamed recipe of a target that need not exist."""
    given = {"data": {"prompts_path": "samples.jsonl"}, "stream": {"managed": {}}}
    return tiny_recipe(Path("target"), Path("runs/run"), **(given | sections))


def refusal(document: dict[str, Any]) -> str:
    with pytest.raises(RecipeError) as caught:
        check_recipe(document)
    return str(caught.value)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny targets and sample files, good and bad; ``recipe.yaml`` streams from a managed server."""
    root = tmp_path_factory.mktemp("recipes")
    save_tokenizer(build_qwen3(root / "target"))
    save_tokenizer(build_qwen3(root / "full"), entries=256)  # no row is left for the mask
    build_qwen3(root / "mute")  # no tokenizer
    write_samples(root / "samples.jsonl")
    (root / "conversations.jsonl").write_text('{"conversations": [{"role": "user", "content": "hi"}]}\n')
    (root / "torn.jsonl").write_text('{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}\n{"input_ids": [1,\n')
    (root / "unequal.jsonl").write_text('{"input_ids": [1, 2, 3], "loss_mask": [1]}\n')
    (root / "unsupervised.jsonl").write_text('{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}\n')
    document = tiny_recipe(
        root / "target",
        root / "run",
        data={"prompts_path": str(root / "samples.jsonl")},
        stream={"managed": {}},
        runtime={"in_flight_low_watermark": 4, "in_flight_high_watermark": 8},
    )
    (root / "recipe.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    return root


def plan(toy: Path, *overrides: str) -> int:
    return main(["--recipe", str(toy / "recipe.yaml"), "--plan", *overrides])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_shipped_recipes_are_valid(path: Path) -> None:
    recipe = load_recipe(path)
    assert (recipe.stream is None) == bool(recipe.specforge_config.data.hidden_states_path)
    assert recipe.specforge_config.training.strategy == "dspine"


def test_the_gpu_recipe_is_the_papers_run() -> None:
    recipe = load_recipe(RECIPES[0].parent / "qwen3_8b.yaml", world_size=7)
    training, runtime = recipe.specforge_config.training, recipe.specforge_config.runtime
    assert 7 * training.batch_size * training.accumulation_steps == 112 <= runtime.in_flight_low_watermark
    assert recipe.dspine.target_layer_ids == (1, 9, 17, 25, 33) and recipe.dspine.block_size == 16
    assert recipe.stream is not None and recipe.stream.managed is not None
    assert recipe.stream.managed.devices == (7,)  # the ranks take 0–6


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (streamed() | {"train": {}}, "train: unknown key; did you mean 'training'?"),
        (streamed(model={"target_modle_path": "x"}), "model.target_modle_path: .* 'target_model_path'"),
        (streamed(data={"prompt_path": "x"}), "data.prompt_path: unknown key; did you mean 'prompts_path'"),
        (streamed(training={"num_anchor": 3}), "training.num_anchor: unknown key; did you mean 'num_anchors'"),
        (streamed(tracking={"reportto": "x"}), "tracking.reportto: unknown key; did you mean 'report_to'"),
        (streamed(runtime={"lease": 3}), "runtime.lease: unknown key; did you mean 'producer_lease'"),
        (streamed(dspine={"topk": 3}), "dspine.topk: unknown key; did you mean 'top_k'"),
        (streamed(stream={"server": []}), "stream.server: unknown key; did you mean 'servers'"),
        (streamed(stream={"managed": {"device": [0]}}), "stream.managed.device: .* 'devices'"),
        (
            streamed(stream={"managed": {"zzz": 1}}),
            "stream.managed.zzz: unknown key; known here: devices, extra_args",
        ),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_known_name(document: dict[str, Any], message: str) -> None:
    assert re.match(message, refusal(document))


def test_a_key_that_is_not_read_is_no_suggestion() -> None:
    assert "'dspark_ce_loss_alpha'" not in refusal(streamed(training={"dspark_ce_loss_alfa": 1.0}))


@pytest.mark.parametrize(("section", "key"), [(section, key) for section in SECTIONS for key in NOT_READ[section]])
def test_keys_of_other_algorithms_are_refused_with_what_to_use(section: str, key: str) -> None:
    message = refusal(streamed(**{section: {key: 1}}))
    instead = NOT_READ[section][key]
    assert message == f"{section}.{key}: DSpine does not read it; " + (f"use {instead}" if instead else "remove it")


@pytest.mark.parametrize("section", NOT_READ[""])
def test_sections_that_mean_nothing_here_are_refused(section: str) -> None:
    instead = NOT_READ[""][section]
    expected = f"{section}: DSpine does not read it; " + (f"use {instead}" if instead else "remove it")
    assert refusal(streamed() | {section: {}}) == expected


def test_missing_sections_are_named() -> None:
    document = streamed()
    assert refusal({k: v for k, v in document.items() if k != "dspine"}).startswith("dspine: the section is missing")
    assert refusal({k: v for k, v in document.items() if k != "stream"}).startswith("stream: the section is missing")
    assert refusal({k: v for k, v in document.items() if k != "model"}) == "model: required, and not given"
    assert refusal(document | {"data": {"max_length": 64}}).startswith("data: give prompts_path")


@pytest.mark.parametrize("stream", [{"servers": ["http://a:1"], "managed": {}}, {"max_dropped": 1}, {"servers": []}])
def test_a_stream_has_servers_or_a_managed_one(stream: dict[str, Any]) -> None:
    document = streamed()
    document["stream"] = stream
    assert refusal(document).startswith("stream: give exactly one of servers (a list of URLs) and managed")


def test_a_feature_folder_takes_the_place_of_the_stream() -> None:
    recipe = check_recipe(streamed(data={"hidden_states_path": "features", "prompts_path": "samples.jsonl"}))
    assert recipe.stream is None and recipe.specforge_config.mode == "offline"
    assert recipe.specforge_config.data.prompts_path == ""
    assert check_recipe(streamed()).specforge_config.mode == "online"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"dspine": {"top_k": "many"}}, "dspine.top_k='many': Input should be a valid integer"),
        ({"dspine": {"block_size": 1}}, "dspine.block_size=1: Input should be greater than or equal to 2"),
        ({"dspine": {"ce_weight": 1.5}}, "dspine.ce_weight=1.5: Input should be less than or equal to 1"),
        ({"dspine": {"alignment_weight": float("nan")}}, "dspine.alignment_weight=nan: Input should be a finite"),
        ({"dspine": {"target_layer_ids": []}}, "dspine.target_layer_ids=[]: "),
        (
            {"dspine": {"target_layer_ids": [1, "x"]}},
            "dspine.target_layer_ids.1='x': Input should be a valid integer",
        ),
        (
            {"dspine": {"normalization": "mean"}},
            "dspine.normalization='mean': Input should be 'separate' or 'shared'",
        ),
        (
            {"dspine": {"replacement_end_ratio": 0.1}},
            "dspine: replacement_end_ratio=0.1 is before replacement_hold_ratio=0.1666",
        ),
        ({"training": {"batch_size": 0}}, "training.batch_size=0: Input should be greater than 0"),
        ({"training": {"learning_rate": "fast"}}, "training.learning_rate='fast': Input should be a valid number"),
        ({"training": {"strategy": "dflash"}}, "training.strategy='dflash': this trainer runs 'dspine'"),
        ({"model": {"torch_dtype": "float64"}}, "model.torch_dtype='float64': Input should be 'bfloat16'"),
        ({"runtime": {"in_flight_low_watermark": 300}}, "runtime: runtime.in_flight_low_watermark must be <="),
        ({"stream": {"managed": {"devices": [0, 1]}}}, "stream.managed: devices=[0, 1] must name tp_size=1 devices"),
        ({"stream": {"managed": {}, "max_dropped": -1}}, "stream.max_dropped=-1: Input should be greater than or"),
    ],
)
def test_wrong_values_are_named_with_their_path(sections: dict[str, Any], message: str) -> None:
    assert refusal(streamed(**sections)).startswith(message)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("run_id", "a/b", "run_id='a/b': checkpoints are named by it"),
        ("run_id", 5, "run_id=5: Input should be a valid string"),
        ("output_dir", None, "output_dir=None: Input should be a valid string"),
        ("model", 5, "model: a section is expected, found 5"),
        ("dspine", [1], "dspine: a section is expected, found [1]"),
        ("stream", {"managed": True}, "stream.managed: a section is expected, found True"),
    ],
)
def test_wrong_kinds_of_value_are_named(key: str, value: Any, message: str) -> None:
    assert refusal(streamed() | {key: value}).startswith(message)


def test_all_wrong_values_are_reported_at_once() -> None:
    lines = refusal(streamed(dspine={"top_k": 0, "message_size": -1})).splitlines()
    assert [line.split("=")[0] for line in lines] == ["dspine.message_size", "dspine.top_k"]


def test_required_keys_are_named_without_the_section_around_them() -> None:
    document = streamed()
    del document["dspine"]["transfer_rank"]
    assert refusal(document) == "dspine.transfer_rank: required, and not given"


def test_overrides_set_typed_values_and_make_sections(toy: Path) -> None:
    recipe = load_recipe(
        toy / "recipe.yaml",
        [
            "dspine.top_k=5",
            "dspine.target_layer_ids=[1, 3]",
            "training.learning_rate=5e-4",
            "tracking.report_to=tensorboard",  # a section that the file lacks
            "stream.managed.extra_args=[--mem-fraction-static, '0.5']",
            "run_id=other",
            "model.mask_token_id=null",
        ],
    )
    assert recipe.dspine.top_k == 5 and recipe.dspine.target_layer_ids == (1, 3)
    assert (
        recipe.specforge_config.training.learning_rate == 5e-4
        and recipe.specforge_config.tracking.report_to == "tensorboard"
    )
    assert recipe.stream is not None and recipe.stream.managed is not None
    assert recipe.stream.managed.extra_args == ("--mem-fraction-static", "0.5")
    assert recipe.run_id == "other" and recipe.mask_token_id is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dspine.top_k", "is not of the form section.key=value"),
        ("=5", "is not of the form section.key=value"),
        ("dspine..top_k=5", "is not of the form section.key=value"),
        ("dspine.top_k=[", "'[' is not YAML"),
        ("stream.managed={devices: [1], devices: [2]}", "the key 'devices' is repeated"),
        ("dspine.top_k.deep=5", "top_k is a value, not a section"),
        ("dspine.topk=5", "dspine.topk: unknown key; did you mean 'top_k'?"),
        ("dspin.top_k=5", "dspin: unknown key; did you mean 'dspine'?"),
        ("deployment.mode=local", "deployment: DSpine does not read it; use torchrun"),
        ("model=5", "model: a section is expected, found 5"),
        ("run_id=''", "run_id='': checkpoints are named by it; give a name without slashes"),
        ("run_id=a/b", "give a name without slashes"),
        ("training.seed=-1", "training.seed=-1: at least 0"),
        ("training.learning_rate=.inf", "training.learning_rate=inf: a finite number"),
        ("training.warmup_ratio=1.0", "training.warmup_ratio=1.0: below 1"),
        ("training.loss_decay_gamma=-7", "training.loss_decay_gamma=-7.0: above 0, or null"),
        ("training.loss_decay_gamma=0", "above 0, or null"),
        ("training.loss_decay_gamma=.nan", "above 0, or null"),
        ("data.max_prompts=0", "data.max_prompts=0: at least 1, or null for all"),
    ],
)
def test_bad_overrides_are_refused(toy: Path, override: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(toy / "recipe.yaml", [override])
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- a\n- b\n", "must be a mapping of sections, found list"),
        (b"", "must be a mapping of sections, found NoneType"),
        (b"model: [\n", "is not YAML"),
        (b"\xff\xfe\x00", "is not YAML"),
        (b"run_id: a\nmodel: {}\nrun_id: b\n", "is not YAML: line 3: the key 'run_id' is repeated"),
        (b"stream:\n  managed:\n    devices: [1]\n    devices: [2]\n", "line 4: the key 'devices' is repeated"),
        (b"model: {[a]: 1}\n", "is not YAML: line 1: found unhashable key"),
        (b"dspine: {top_k: 4, 'top_k': 5}\n", "line 1: the key 'top_k' is repeated"),
        (b"heldout:\n- {interval: 1, interval: 1}\n", "line 2: the key 'interval' is repeated"),
        (None, "No such file or directory"),
    ],
)
def test_files_that_are_no_recipes_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        load_recipe(path)


@pytest.mark.parametrize("offline", [False, True])
def test_the_saved_recipe_holds_every_default_and_reads_back_as_itself(tmp_path: Path, offline: bool) -> None:
    recipe = check_recipe(streamed(data={"hidden_states_path": "features"}) if offline else streamed())
    recipe.save(tmp_path / "recipe.yaml")
    saved = yaml.safe_load((tmp_path / "recipe.yaml").read_text(encoding="utf-8"))
    assert saved["training"]["lr_scheduler"] == "cosine" and saved["dspine"]["ce_weight"] == 0.1
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    assert [entry.name for entry in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_recipe_says_what_differs_from_its_base(tmp_path: Path) -> None:
    """The DFlash baseline is the DSpine recipe but for the method, the name and the folder."""
    for size in ("smollm2_cpu", "qwen3_8b"):
        ours, baseline = (load_recipe(RECIPES[0].parent / f"{size}{suffix}.yaml") for suffix in ("", "_dflash"))
        assert (baseline.specforge_config.training, baseline.specforge_config.data) == (
            ours.specforge_config.training,
            ours.specforge_config.data,
        )
        differing = {k for k, v in baseline.dspine.model_dump().items() if v != getattr(ours.dspine, k)}
        assert differing == {"causal", "injection", "refinement", "curriculum", "alignment", "ce_weight"}
        assert baseline.run_dir != ours.run_dir
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(RecipeError, match=r"base='b.yaml' of .*a.yaml has a base itself, 'a.yaml'"):
        load_recipe(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("child", "expected"),
    [
        ({"stream": {"managed": {"startup_timeout_s": 9}}}, {"devices": [7], "tp_size": 1, "startup_timeout_s": 9}),
        ({"stream": {"managed": {"devices": [0, 1], "tp_size": 2}}}, {"devices": [0, 1], "tp_size": 2}),
        ({"stream": {"managed": None}}, None),
        ({"stream": {"managed": {}}}, {"devices": [7], "tp_size": 1}),
        ({"stream": None}, "no section"),
    ],
)
def test_a_recipe_is_merged_into_its_base_at_every_depth(tmp_path: Path, child: Any, expected: Any) -> None:
    base = {"stream": {"managed": {"devices": [7], "tp_size": 1}, "max_dropped": 3}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    (tmp_path / "child.yaml").write_text(yaml.safe_dump(child | {"base": "base.yaml"}))
    stream = read_document(tmp_path / "child.yaml")["stream"]
    assert (stream or {"managed": "no section"})["managed"] == expected
    assert stream is None or stream["max_dropped"] == 3


@pytest.mark.parametrize(
    "override",
    [
        "output_dir=~/x",
        "model.target_model_path=~/x",
        "data.prompts_path=~/x",
        "heldout={hidden_states_path: ~/x, interval: 1}",
        "stream={capture_dir: ~/x, servers: [u]}",
        "stream.managed.extra_args=[--tokenizer-path, ~/x]",
    ],
)
def test_a_tilde_is_the_home_folder(toy: Path, override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    printed = str(load_recipe(toy / "recipe.yaml", [override]))
    assert "/home/someone/x" in printed and "~" not in printed


def test_a_printed_recipe_reads_back_as_itself(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--recipe", str(toy / "recipe.yaml"), "training.seed=7"]
    assert main([*words, "--print-recipe"]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert load_recipe(tmp_path / "printed.yaml") == load_recipe(toy / "recipe.yaml", words[2:])


def test_a_plan_prints_the_run_and_starts_nothing(toy: Path) -> None:
    """In a process of its own: no server, no folder, status 0."""
    before = sorted(toy.rglob("*"))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "specforge_dspine.train", "--recipe", str(toy / "recipe.yaml")),
            *("training.num_epochs=2", "--plan", "training.max_steps=10"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["target"] == f"{toy / 'target'}: 6 layers, H=64, V=256, float32"
    assert lines["schedule"].startswith("10 steps of 10; lr 0.001, warm-up 2 steps, then cosine")
    assert lines["data"] == "24 samples × 2 epochs; 0 fill no whole step, 28 lie beyond max_steps"
    assert lines["curriculum"] == "p = 0.5 until step 1, 0 from step 3, in layer 1 of 2"
    assert "of which injection 3,464" in lines["parameters"]  # 2·16·64 + 2·64·8 + 3·8·16 + 8
    assert "a server of this run (devices cpu, tp 1)" in lines["features"]
    assert sorted(toy.rglob("*")) == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dspine.topk=4", "did you mean 'top_k'?"),
        # pitfalls of mask tokens (NeMo#2461, ModelOpt#1621)
        ("model.mask_token_id=2", "model.mask_token_id = 2 is the tokenizer's eos token '<eos>'"),
        ("model.mask_token_id=256", "model.mask_token_id = 256: the embedding has rows 0 to 255"),
        ("model.mask_token_id=50", "rows 250 to 255 are unused"),
        ("model.target_model_path={toy}/full", "set model.mask_token_id to a reserved id"),
        # layer ids that are missing, repeated, last or out of range (sglang#37475, NeMo#3083)
        ("dspine.target_layer_ids=[1, 1, 2]", "must increase without duplicates"),
        ("dspine.target_layer_ids=[3, 1]", "must increase without duplicates"),
        ("dspine.target_layer_ids=[1, 5]", "5 is the last layer"),
        ("dspine.target_layer_ids=[1, 6]", "6 is out of range; give strictly increasing ids from 0 to 4"),
        ("dspine.target_layer_ids=[-1, 2]", "-1 is out of range"),
        ("dspine.target_layer_ids=null", "dspine.target_layer_ids=None"),
        # sizes
        ("dspine.transfer_rank=65", "dspine.transfer_rank=65: at most the target's hidden size, 64"),
        ("dspine.top_k=251", "top_k=251 exceeds the 250 ids that the target can emit"),
        ("dspine.excluded_ids=[-1, 256]", "excluded_ids=[-1, 256]: the target's head has rows 0 to 255"),
        ("dspine.valid_vocab_size=300", "valid_vocab_size=300 exceeds the 256 rows"),
        # paths
        ("model.target_model_path={toy}/none", "/none': no such folder"),
        ("model.target_model_path={toy}", "Unrecognized model"),
        ("model.target_model_path={toy}/mute", "/mute' holds no tokenizer"),
        ("model.draft_checkpoint_path={toy}/none", "model.draft_checkpoint_path='"),
        ("data.prompts_path={toy}/none.jsonl", "no such file; data_prep.tokenize writes one"),
        ("data.prompts_path={toy}/conversations.jsonl", "holds no token ids: DSpine learns from"),
        ("data.prompts_path={toy}/torn.jsonl", "invalid JSON"),
        ("data.prompts_path={toy}/unequal.jsonl", "unequal.jsonl:1 has mismatched input_ids/loss_mask lengths"),
        ("data.prompts_path={toy}/unsupervised.jsonl", "no sample has two consecutive supervised tokens"),
        ("data.hidden_states_path={toy}/full", "holds no .ckpt files"),
    ],
)
def test_the_command_line_says_what_is_wrong_in_one_line(
    toy: Path, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(toy.rglob("*"))
    assert plan(toy, override.format(toy=toy)) == 2
    output = capsys.readouterr()
    (line,) = [line for line in output.err.splitlines() if line.startswith("error: ")]
    assert message in line and "Traceback" not in output.err
    assert output.err.endswith(line + "\n") and not output.out
    assert sorted(toy.rglob("*")) == before


def test_a_missing_recipe_is_one_line_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--recipe", str(tmp_path / "none.yaml"), "--plan"]) == 2
    assert capsys.readouterr().err.startswith(f"error: recipe {tmp_path / 'none.yaml'}: No such file")


def test_a_run_of_a_bad_recipe_makes_no_folder(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--recipe", str(toy / "recipe.yaml"), "dspine.target_layer_ids=[1, 5]"]
    assert main(arguments) == 2
    assert "5 is the last layer" in capsys.readouterr().err
    assert not (toy / "run").exists()


def test_under_torchrun_rank_0_alone_prints_the_plan(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, printed in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        assert plan(toy) == 0
        output = capsys.readouterr().out
        assert ("2 rank(s) on cpu" in output) == bool(output) == printed


@pytest.mark.parametrize("error", [RunError("disk full"), FloatingPointError("loss is nan")])
def test_a_failed_run_ends_with_1_and_the_next_step(
    toy: Path,
    tmp_path: Path,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(train, "make_plan", fail)
    run = tmp_path / "run"
    for advice in ("run the same command again", "rerun with --resume to continue"):
        assert main(["--recipe", str(toy / "recipe.yaml"), f"output_dir={run}"]) == 1
        assert capsys.readouterr().err == f"error: {error}\nFix the error above, then {advice}.\n"
        run.mkdir(exist_ok=True)
        (run / "metrics.jsonl").write_text('{"step": 1}\n')  # the second time, a step was taken
