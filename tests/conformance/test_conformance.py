"""The conformance check passes on the golden vectors in every dtype, and reports every quantity that is wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specforge_dspine.conformance import checks
from specforge_dspine.conformance.__main__ import main
from specforge_dspine.conformance.checks import conformance
from specforge_dspine.conformance.vectors import INPUTS
from specforge_dspine.decoding.proposal import Proposal
from specforge_dspine.modeling import draft_model as model
from specforge_dspine.modeling import injection
from specforge_dspine.objective import loss
from specforge_dspine.utils.errors import InvalidFileError
from tests.support import ROOT

GOLDEN = ROOT / "tests" / "golden"
FILES = [GOLDEN / "plain.safetensors", GOLDEN / "padded_vocab.safetensors"]
KEYS = sorted(load_file(FILES[0]))
QUANTITIES = [key for key in KEYS if not key.startswith(INPUTS) and key != "decode/path"]
SCALARS = [f"{name}_{kind}" for kind in ("separate", "shared") for name in ("loss", "numerator", "denominator")]


def copy_of(
    file: Path,
    out: Path,
    *,
    tensors: Callable[[dict[str, Tensor]], object] | None = None,
    scalars: Callable[[dict[str, Any]], object] | None = None,
) -> Path:
    """A vector file with something changed in place."""
    values, numbers = load_file(file), json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
    for change, content in ((tensors, values), (scalars, numbers)):
        if change is not None:
            change(content)
    save_file(values, out / file.name)
    (out / file.name).with_suffix(".json").write_text(json.dumps(numbers), encoding="utf-8")
    return out / file.name


def off(file: Path, dtype: torch.dtype = torch.float64) -> set[str]:
    """Quantities that do not agree, whichever of the two implementations of the distillation shows it."""
    return {check.name.removesuffix(" (by autograd)") for check in conformance(file, dtype) if not check.ok}


def perturbed(value: Tensor) -> Tensor:
    """One entry moved: a float by a thousandth of the largest, a discrete one to another possible value."""
    changed = value.clone()
    first = changed.view(-1)[:1]
    if value.is_floating_point():
        first += 1e-3 * value.abs().max()
    elif value.dtype is torch.bool or int(value.max()) <= 1:
        first.copy_(1 - first.long())
    else:
        first += 1 if int(first) < int(value.max()) else -1
    return changed


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_this_installation_conforms(file: Path, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(file), "--dtype", dtype]) == 0
    output = capsys.readouterr()
    lines = [line.split() for line in output.out.splitlines()]
    named = {line[-1] for line in lines if line[0] == "ok"}
    keys = {key for key in load_file(file) if not key.startswith(INPUTS)} - {"decode/path"}
    assert keys | set(SCALARS) | {"schedule/beta", "schedule/replacement_probability"} <= named
    assert " ".join(lines[-1]).endswith(f"in {dtype}: {len(lines) - 1} of {len(lines) - 1} quantities agree")
    assert not output.err


def test_the_command_line_in_a_process_of_its_own(tmp_path: Path) -> None:
    file = copy_of(FILES[0], tmp_path, scalars=lambda s: s.update(loss_shared=s["loss_shared"] * 1.001))
    done = subprocess.run(
        [sys.executable, "-m", "specforge_dspine.conformance", str(file), "--dtype", "float32"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: mismatch: loss_shared, loss_shared (by autograd)"
    assert "MISMATCH   9.99e-04 (allowed 5e-05)  loss_shared" in done.stdout


@pytest.mark.parametrize("key", [key for key in QUANTITIES if not key.startswith("grads_")])
def test_each_quantity_that_is_off_is_reported_by_name(tmp_path: Path, key: str) -> None:
    file = copy_of(FILES[0], tmp_path, tensors=lambda t: t.update({key: perturbed(t[key])}))
    found = off(file)
    assert key in found
    alone = {"decode/candidates": "decode/", "rows/candidates": "rows/", "decode/greedy": "decode/greedy"}
    assert all(name.startswith(alone.get(key, key)) for name in found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_each_gradient_that_is_off_is_reported_and_no_other(tmp_path: Path, file: Path, dtype: torch.dtype) -> None:
    """Every second one is changed: exactly these are off."""
    changed = [key for key in sorted(load_file(file)) if key.startswith("grads_")][::2]
    changed += [key for key in sorted(load_file(file)) if key.startswith("outputs/")][::2]
    assert off(
        copy_of(file, tmp_path, tensors=lambda t: [t[key].copy_(perturbed(t[key])) for key in changed]), dtype
    ) == set(changed)


@pytest.mark.parametrize("name", ["beta", "replacement_probability", *SCALARS])
def test_each_scalar_that_is_off_is_reported_by_name(tmp_path: Path, name: str) -> None:
    found = off(copy_of(FILES[1], tmp_path, scalars=lambda s: s.update({name: s[name] * 1.001})))
    assert (name if name in SCALARS else f"schedule/{name}") in found
    if name != "beta":  # the loss is computed with the file's β
        assert len(found) == 1


@pytest.mark.parametrize("factor", [-1.0, 0.0, 0.25, 4.0])
def test_bfloat16_sees_wrong_gradients_and_outputs_too(tmp_path: Path, factor: float) -> None:
    keys = [key for key in QUANTITIES if key.startswith(("grads_", "outputs/"))][::2]
    file = copy_of(FILES[0], tmp_path, tensors=lambda t: [t[key].mul_(factor) for key in keys])
    assert off(file, torch.bfloat16) == set(keys)


@pytest.mark.parametrize(
    "key", ["outputs/hidden", "rows/ce", "decode/scores", "transfer/codes", "grads_shared/norm.weight"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_nan_is_off(tmp_path: Path, key: str, dtype: torch.dtype) -> None:
    file = copy_of(FILES[0], tmp_path, tensors=lambda t: t[key].view(-1).__setitem__(0, torch.nan))
    assert off(file, dtype) == {key}


@pytest.mark.parametrize("key", ["outputs/features", "rows/rl1", "rows/label", "decode/path_probs_t0.7"])
def test_a_quantity_of_another_shape_is_off(tmp_path: Path, key: str) -> None:
    file = copy_of(FILES[0], tmp_path, tensors=lambda t: t.update({key: t[key][:-1].contiguous()}))
    assert key in off(file)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("key", ["rows/candidates", "decode/candidates"])
def test_candidates_of_another_shape_are_named(tmp_path: Path, key: str, dtype: torch.dtype) -> None:
    file = copy_of(FILES[0], tmp_path, tensors=lambda t: t.update({key: t[key][:-1].contiguous()}))
    with pytest.raises(InvalidFileError, match=f"{key} is .*, expected"):
        conformance(file, dtype)


@pytest.mark.parametrize("key", ["rows/candidates", "decode/candidates"])
@pytest.mark.parametrize("id_", [-1, 80, 10**6])
def test_impossible_candidates_are_off(tmp_path: Path, key: str, id_: int) -> None:
    file = copy_of(FILES[0], tmp_path, tensors=lambda t: t[key].view(-1).__setitem__(-1, id_))
    assert key in off(file)


@pytest.mark.parametrize("key", ["rows/candidates", "decode/candidates"])
def test_a_candidate_named_twice_is_off(tmp_path: Path, key: str) -> None:
    file = copy_of(FILES[0], tmp_path, tensors=lambda t: t[key][0, 0].copy_(t[key][0, 1]))
    assert key in off(file)


def test_an_excluded_candidate_is_off(tmp_path: Path) -> None:
    """An excluded id would rank among the candidates of this file."""
    found = off(copy_of(FILES[0], tmp_path, scalars=lambda s: s.update(excluded_ids=[s["mask_token_id"]])))
    assert "decode/candidates" in found


@pytest.mark.parametrize("key", [*KEYS[:: len(KEYS) // 12], "decode/path", "inputs/replace", "target/lm_head"])
def test_a_missing_key_is_named(tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = copy_of(FILES[0], tmp_path, tensors=lambda t: t.pop(key))
    assert main([str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and key.removeprefix("weights/") in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("name", ["beta", "config", "mask_token_id", "excluded_ids", "loss_shared", "step"])
def test_a_missing_scalar_is_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(copy_of(FILES[0], tmp_path, scalars=lambda s: s.pop(name)))]) == 2
    assert f"{name} is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t["target/lm_head"].view(-1).__setitem__(3, torch.nan),
            "target/lm_head holds a value that is not",
        ),
        (
            lambda t: t["inputs/taps"].view(-1).__setitem__(3, torch.inf),
            "inputs/taps holds a value that is not finite",
        ),
        (lambda t: t["weights/norm.weight"].fill_(torch.nan), "weights/norm.weight holds a value that is not finite"),
        (lambda t: t["inputs/input_ids"].fill_(80), "inputs/input_ids holds an id outside the 80 rows"),
        (lambda t: t.update({"weights/injection.gate.weight": torch.zeros(2)}), "unknown tensors: injection.gate"),
    ],
    ids=["head", "taps", "weight", "ids", "unknown weight"],
)
def test_inputs_that_cannot_be_used_are_named(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        conformance(copy_of(FILES[0], tmp_path, tensors=change), torch.float64)


def test_files_that_are_no_vector_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "none.safetensors")])
    assert "none.safetensors: no such file or folder" in capsys.readouterr().err
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    assert main([str(tmp_path / "torn.safetensors")]) == 2
    shutil.copy(FILES[0], tmp_path / "alone.safetensors")
    assert main([str(tmp_path / "alone.safetensors")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [error.startswith("error: ") for error in errors] == [True] * 2
    assert "torn.safetensors is not a safetensors file" in errors[0] and "alone.json" in errors[1]
    with pytest.raises(InvalidFileError):
        conformance(tmp_path / "torn.safetensors", torch.float64)


def backbone_only(scores: Tensor, ids: Tensor, _sampling: Any) -> Proposal:
    """A walk that ignores its predecessor."""
    best = scores[..., 0, :].argmax(dim=-1, keepdim=True)
    return Proposal(ids.gather(-1, best).squeeze(-1), ids, None)


def without_rms(self: Any, layer: int, state: Tensor, receiver: Tensor, predecessor: Tensor) -> Tensor:
    """Last line of ``write`` without RMS(u)."""
    write = injection.linear
    gate = torch.sigmoid(
        write(receiver, self.receiver_gate) + write(predecessor, self.predecessor_gate) + self.bias.to(state.dtype)
    )
    return state + write(gate * write(predecessor, self.message), self.writes[layer])


def everywhere_normalized(numerator: Tensor, denominator: Tensor) -> Tensor:
    return numerator / (denominator + 1)


def unscaled_codes(self: Any, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes without √r."""
    return self.transfer_codes[ids].to(dtype)


BUGS = {
    "the walk ignores its predecessor": (checks, "walk", backbone_only, {"decode/greedy"}),
    "RMS(u) omitted": (
        injection.AdjacentCausalInjection,
        "write",
        without_rms,
        {"outputs/hidden", "outputs/hidden_no_replacement", "decode/scores", "rows/ce", "loss_separate"},
    ),
    "codes without √r": (
        model.DSpineDraftModel,
        "codes",
        unscaled_codes,
        {"outputs/hidden", "decode/scores", "rows/rce", "loss_shared", "grads_shared/fc.weight"},
    ),
    "normalized by one too much": (
        loss,
        "weighted_mean",
        everywhere_normalized,
        {"loss_separate", "loss_shared", "grads_separate/norm.weight"},
    ),
}


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_a_wrong_implementation_is_seen(file: Path, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong, expected = BUGS[bug]
    monkeypatch.setattr(owner, name, wrong)
    assert expected <= off(file)
