"""Capture through real SGLang servers on the CPU, against transformers in float32, for two kinds of targets."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from specforge.runtime.data_plane.feature_store import load_feature_file

from specforge_dspine import capture as capture_command
from specforge_dspine.streaming import client as client_module
from specforge_dspine.streaming import verification
from specforge_dspine.streaming.client import RequestRefused, SGLangClient
from specforge_dspine.streaming.protocol import CAPTURE_KEY, PROTOCOL, mask_to_spans
from specforge_dspine.streaming.record import RecordError, Sample, read_record, sample_name
from specforge_dspine.streaming.verification import CaptureVerificationError, check_head
from specforge_dspine.utils.versions import VERSION
from tests.conftest import TAPS, LiveTarget, wait_for
from tests.support.targets import EOS, HIDDEN, LAYERS, VOCAB

pytestmark = pytest.mark.server

ATOL = 1e-4


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def sample(length: int, seed: int) -> Sample:
    ids = prompt(length, seed)
    mask = [int(k >= length // 3 and k % 5 > 0) for k in range(length)]
    return Sample(sample_name(ids, mask), ids, mask)


def take(result: Path | RecordError) -> dict[str, torch.Tensor]:
    assert isinstance(result, Path), result
    record = load_feature_file(str(result))  # SpecForge's own reader
    result.unlink()
    return record


def assert_matches(record: dict[str, torch.Tensor], wanted: Sample, live: LiveTarget) -> None:
    assert list(record) == ["input_ids", "loss_mask", "hidden_states", "target_last_hidden_states"]
    assert record["input_ids"].tolist() == wanted.input_ids
    assert record["loss_mask"].tolist() == wanted.loss_mask
    taps, final = live.states(wanted.input_ids)
    assert record["hidden_states"].shape == (1, len(wanted.input_ids), len(TAPS) * HIDDEN)
    torch.testing.assert_close(record["hidden_states"], taps, atol=ATOL, rtol=0)
    torch.testing.assert_close(record["target_last_hidden_states"], final, atol=ATOL, rtol=0)


def greedy(live: LiveTarget, ids: list[int], count: int) -> list[int]:
    with torch.no_grad():
        out = live.model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
    return out[0, len(ids) :].tolist()


def ask(live: LiveTarget, ids: list[list[int]], custom: list[dict[str, Any] | None], count: int = 1) -> list[Any]:
    """A raw request, for what the client would never send."""
    sampling = [
        {"max_new_tokens": count, "temperature": 0.0, **({"custom_params": one} if one is not None else {})}
        for one in custom
    ]
    body = {"input_ids": ids, "sampling_params": sampling}
    response = requests.post(f"{live.server.url}/generate", json=body, timeout=60)
    assert response.ok, response.text
    return response.json()


def opt_in(name: str, tokens: int, **changes: Any) -> dict[str, Any]:
    return {CAPTURE_KEY: {"protocol": PROTOCOL, "name": name, "tokens": tokens, "loss_mask": [], **changes}}


def discard_probes(live: LiveTarget) -> None:
    """A refused server's probes are not waited for, and appear nevertheless."""
    wait_for(lambda: len(list(live.server.spool.glob("probe*.ckpt"))) == client_module.PROBES)
    for probe in live.server.spool.iterdir():
        probe.unlink()


# ---- records ----------------------------------------------------------------------------------------


def test_the_reference_can_tell_right_from_wrong(live: LiveTarget) -> None:
    """Neighboring layers, and the states before and after the final norm, differ far beyond the tolerance."""
    taps, final = live.states(prompt(20, 0))
    shifted, _ = live.states(prompt(20, 0), tuple(k + 1 for k in TAPS))
    last_layer, _ = live.states(prompt(20, 0), (LAYERS - 2,))
    assert (taps - shifted).abs().max() > 0.1
    with torch.no_grad():
        before_norm = live.model.model.layers[-1](
            last_layer,
            position_embeddings=live.model.model.rotary_emb(last_layer, torch.arange(20)[None]),
        )
    assert (final - before_norm).abs().max() > 0.1
    torch.testing.assert_close(live.model.model.norm(before_norm)[:, 0], final[:, 0], atol=ATOL, rtol=0)


def test_single_records_equal_transformers(live: LiveTarget, client: SGLangClient) -> None:
    for length in (1, 2, 17, 128):
        wanted = sample(length, length)
        [result] = client.capture([wanted], live.identity)
        assert_matches(take(result), wanted, live)


def test_batched_records_equal_transformers_in_order(live: LiveTarget, client: SGLangClient) -> None:
    samples = [sample(5 + 11 * (k % 7), 100 + k) for k in range(20)]
    for wanted, result in zip(samples, client.capture(samples, live.identity), strict=True):
        assert isinstance(result, Path)
        assert result.name.startswith(wanted.name)
        assert_matches(take(result), wanted, live)


def test_the_same_prompt_again_gives_full_records(live: LiveTarget, client: SGLangClient) -> None:
    wanted = sample(60, 7)
    longer = Sample("longer", [*wanted.input_ids, *prompt(20, 8)], [1] * 80)
    for _ in range(2):
        results = client.capture([wanted, wanted, longer], live.identity)
        assert len({result for result in results if isinstance(result, Path)}) == 3
        for expected, result in zip([wanted, wanted, longer], results, strict=True):
            assert_matches(take(result), expected, live)


def test_one_batch_mixes_capture_and_generation(live: LiveTarget, client: SGLangClient) -> None:
    """Responses stay with their requests, whoever else was in the batch and whoever goes on decoding."""
    ids = [prompt(9 + k, 200 + k) for k in range(8)]
    names = {k: f"mixed{k}" for k in (1, 4, 5)}
    custom = [opt_in(names[k], len(ids[k])) if k in names else None for k in range(8)]
    for k, response in enumerate(ask(live, ids, custom, count=6)):
        assert response["output_ids"] == greedy(live, ids[k], 6)
        entries = response["meta_info"][CAPTURE_KEY]
        assert all(entry is None for entry in entries[1:])
        if k not in names:
            assert entries[0] is None
            continue
        assert entries[0]["file"] == names[k]
        assert entries[0]["tokens"] == len(ids[k])
        expected = Sample(names[k], ids[k], [0] * len(ids[k]))
        path = live.server.spool / f"{names[k]}.ckpt"
        wait_for(path.is_file)
        assert_matches(take(path), expected, live)


def test_capture_beside_running_generation(live: LiveTarget, client: SGLangClient) -> None:
    ids = [prompt(12, 300 + k) for k in range(6)]
    outputs: list[list[int]] = []

    def generate() -> None:
        with SGLangClient(live.server.url, timeout_s=60) as other:
            outputs.extend(one.output_ids for one in other.generate(ids, max_new_tokens=48))

    background = threading.Thread(target=generate)
    background.start()
    samples = [sample(30 + k, 400 + k) for k in range(12)]
    results = [result for wanted in samples for result in client.capture([wanted], live.identity)]
    background.join(60)
    assert outputs == [greedy(live, one, 48) for one in ids]
    for wanted, result in zip(samples, results, strict=True):
        assert_matches(take(result), wanted, live)


def test_streams_of_others_stay_apart(live: LiveTarget, client: SGLangClient) -> None:
    """A request that was never near a capture and one that shared a batch with one decode side by side.

    SGLang 0.5.14 counts additional answers among the requests that have one; if only some had, they would reach the
    wrong request or end the server.
    """
    alone, beside, captured = prompt(9, 1), prompt(10, 2), sample(11, 3)
    first: list[int] = []
    started = threading.Event()

    def stream(ids: list[list[int]], custom: list[dict[str, Any]], count: int) -> Iterator[tuple[int, list[int]]]:
        sampling = [{"max_new_tokens": count, "temperature": 0, "ignore_eos": True, **one} for one in custom]
        body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
        with requests.post(f"{live.server.url}/generate", json=body, timeout=60, stream=True) as response:
            for line in response.iter_lines():
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    yield event.get("index", 0), event["output_ids"]

    def generate() -> None:
        for _, ids in stream([alone], [{}], 150):
            first[:] = ids
            started.set()

    background = threading.Thread(target=generate)
    background.start()
    assert started.wait(30)
    opted = {"custom_params": opt_in("beside", 11, loss_mask=mask_to_spans(captured.loss_mask))}
    outputs = dict(stream([beside, captured.input_ids], [{}, opted | {"max_new_tokens": 1}], 60))
    background.join(60)
    assert (len(first), len(outputs[0]), len(outputs[1])) == (150, 60, 1)
    for ids, got in ((alone, first), (beside, outputs[0]), (captured.input_ids, outputs[1])):
        wanted = greedy(live, ids, len(got))
        assert got[: len(wanted)] == wanted
    wait_for((live.server.spool / "beside.ckpt").is_file)
    assert_matches(take(live.server.spool / "beside.ckpt"), captured, live)


# ---- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../escaped", "/escaped", "a/b", ".hidden", "", "x" * 300, 7])
def test_a_malicious_name_writes_nothing(live: LiveTarget, client: SGLangClient, name: Any) -> None:
    before = set(live.server.spool.parent.rglob("*"))
    [response] = ask(live, [prompt(4, 1)], [opt_in(name, 4)])
    assert "name = " in response["meta_info"][CAPTURE_KEY][0]["error"]
    assert set(live.server.spool.parent.rglob("*")) == before


@pytest.mark.parametrize(
    ("custom", "message"),
    [
        (opt_in("a", 4, protocol=PROTOCOL + 1), f"protocol {PROTOCOL + 1} is not understood"),
        ({CAPTURE_KEY: "yes"}, "protocol 'yes' is not understood"),
        (opt_in("a", 5), "computes 4 of 5 tokens"),
        (opt_in("a", 4, loss_mask=[[0, 5]]), "within 4 tokens"),
    ],
)
def test_other_bad_requests_are_answered_with_an_error(
    live: LiveTarget, client: SGLangClient, custom: dict[str, Any], message: str
) -> None:
    [response] = ask(live, [prompt(4, 1)], [custom])
    assert message in response["meta_info"][CAPTURE_KEY][0]["error"]
    assert response["output_ids"] == greedy(live, prompt(4, 1), 1)


def test_one_sample_too_long_leaves_the_others_alone(live: LiveTarget, client: SGLangClient) -> None:
    samples = [sample(20, 1), Sample("toolong", prompt(600, 2), [1] * 600), sample(21, 3)]
    first, second, third = client.capture(samples, live.identity)
    assert isinstance(second, RecordError)
    assert second.name == "toolong"
    assert "600" in second.reason
    assert_matches(take(first), samples[0], live)
    assert_matches(take(third), samples[2], live)


def test_a_failed_write_becomes_the_samples_error(
    live: LiveTarget, client: SGLangClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module.secrets, "token_hex", lambda _: "taken")
    blocker = live.server.spool / "blocked.taken.ckpt"
    blocker.mkdir()  # a file cannot replace a directory
    [result] = client.capture([Sample("blocked", prompt(4, 1), [1] * 4)], live.identity)
    blocker.rmdir()
    assert isinstance(result, RecordError)
    assert "could not write the record: IsADirectoryError" in result.reason


# ---- generation -------------------------------------------------------------------------------------


def test_generation_is_greedy_and_ends_with_the_stop_token(live: LiveTarget, client: SGLangClient) -> None:
    ids = [prompt(10, 500 + k) for k in range(6)]
    expected = [greedy(live, one, 16) for one in ids]
    for wanted, got in zip(expected, client.generate(ids, max_new_tokens=16), strict=True):
        assert got.output_ids == wanted
        assert got.finish == ("stop" if wanted[-1] == EOS else "length")
    stop = expected[0][3]
    [stopped] = client.generate(ids[:1], max_new_tokens=16, stop_token_ids=[stop])
    assert stopped.output_ids == expected[0][: expected[0].index(stop) + 1]
    assert stopped.finish == "stop"


def test_what_the_server_refuses_is_said(live: LiveTarget, client: SGLangClient) -> None:
    with pytest.raises(RequestRefused, match="600"):
        client.generate([prompt(600, 1)], max_new_tokens=4)


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(ConnectionError, match=r"no answer from http://127.0.0.1:9 .*Is the server running"):
        SGLangClient("http://127.0.0.1:9").generate([[1]], max_new_tokens=1)


# ---- verification --------------------------------------------------------------------------------------


def test_a_right_server_is_verified(live: LiveTarget, client: SGLangClient) -> None:
    client.verify_server(live.identity, live.head, prompt(40, 600))
    assert client.capture_dir == live.server.spool


def test_a_path_that_leads_to_the_same_target(live: LiveTarget, client: SGLangClient, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(live.path)
    client.verify_server(replace(live.identity, model_path=str(tmp_path / "link")), live.head, prompt(40, 600))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_path", "/models/another"),
        ("num_layers", LAYERS + 1),
        ("vocab_size", VOCAB + 8),
        ("hidden_size", HIDDEN // 2),
        ("layers", (0, 2, 3)),
        ("dtype", "bfloat16"),
    ],
)
def test_another_target_is_refused(live: LiveTarget, client: SGLangClient, field: str, value: Any) -> None:
    other = replace(live.identity, **{field: value})
    head = torch.zeros(other.vocab_size, other.hidden_size)
    with pytest.raises(CaptureVerificationError, match=f"server's {field} is .*, this run needs") as caught:
        client.verify_server(other, head, prompt(40, 600))
    assert "restart the server" in str(caught.value)
    discard_probes(live)


def test_another_head_is_refused(live: LiveTarget, client: SGLangClient) -> None:
    with pytest.raises(CaptureVerificationError, match="the head is not this target's"):
        client.verify_server(live.identity, live.head.roll(1, dims=0), prompt(40, 600))
    with pytest.raises(ValueError, match="lm_head has shape"):
        client.verify_server(live.identity, live.head[:-1], prompt(40, 600))


def test_states_before_the_final_norm_are_refused(live: LiveTarget, client: SGLangClient) -> None:
    """The verification's own arithmetic, on states that are right in everything but the norm."""
    norm = live.model.model.norm.weight.detach()
    ids = [prompt(40, 600 + k) for k in range(8)]
    finals = [live.states(one)[1][0, -1] for one in ids]
    tokens = [greedy(live, one, 1)[0] for one in ids]
    check_head(live.server.url, live.head, torch.stack(finals), tokens, torch.float32)
    with pytest.raises(CaptureVerificationError, match="not those after its final norm"):
        check_head(live.server.url, live.head, torch.stack([final / norm for final in finals]), tokens, torch.float32)


def test_ties_verify_nothing(live: LiveTarget, client: SGLangClient) -> None:
    with pytest.raises(CaptureVerificationError, match=r"tie within rounding.*another probe"):
        client.verify_server(live.identity, torch.zeros_like(live.head), prompt(40, 600))


def test_another_version_is_refused(live: LiveTarget, client: SGLangClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "VERSION", "9.9.9")
    with pytest.raises(CaptureVerificationError, match=f"version is '{VERSION}', ours is '9.9.9'; install"):
        client.verify_server(live.identity, live.head, prompt(40, 600))
    discard_probes(live)


def test_another_protocol_is_refused(live: LiveTarget, client: SGLangClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (client_module, verification):
        monkeypatch.setattr(module, "PROTOCOL", 99)
    with pytest.raises(CaptureVerificationError, match="protocol is 1, ours is 99"):
        client.verify_server(live.identity, live.head, prompt(40, 600))


def test_a_directory_that_is_not_shared_is_noticed(
    live: LiveTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PROBE_WAIT_S", 0.5)
    for directory, message in (
        (tmp_path, r"did not appear.*must share that directory"),
        (tmp_path / "nowhere", "does not exist on this machine"),
    ):
        with SGLangClient(live.server.url, capture_dir=directory) as client:
            with pytest.raises(CaptureVerificationError, match=message):
                client.verify_server(live.identity, live.head, prompt(40, 600))
            discard_probes(live)


# ---- the capture command ----------------------------------------------------------------------------


def write_samples(path: Path, samples: list[Sample], *more: str) -> Path:
    lines = [json.dumps({"input_ids": one.input_ids, "loss_mask": one.loss_mask}) for one in samples]
    path.write_text("\n".join([*lines, *more]) + "\n")
    return path


def test_capture_command_writes_continues_and_refuses(
    live: LiveTarget, client: SGLangClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [sample(10 + k, 700 + k) for k in range(9)]
    file = write_samples(
        tmp_path / "samples.jsonl",
        [*samples, samples[2]],
        "{broken",
        json.dumps({"input_ids": [1, VOCAB], "loss_mask": [0, 1]}),
        json.dumps({"input_ids": [3] * 40, "loss_mask": [0] * 30 + [1] * 10}),
    )
    out = tmp_path / "features"
    command = ["--target", str(live.path), "--samples", str(file), "--layers", ",".join(map(str, TAPS))]
    command += ["--out", str(out), "--server", live.server.url, "--dtype", "float32", "--max-length", "15"]
    assert capture_command.main([*command, "--batch", "4"]) == 0

    cut = [Sample("", one.input_ids[:15], one.loss_mask[:15]) for one in samples]
    names = [sample_name(one.input_ids, one.loss_mask) for one in cut]
    expected = {f"{name}.ckpt" for name in names} | {f"{names[2]}-1.ckpt"}
    assert {path.name for path in out.glob("*.ckpt")} == expected
    for name, one in zip(names, cut, strict=True):
        assert_matches(read_record(out / f"{name}.ckpt"), one, live)
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["complete"], manifest["count"]) == (True, 10)
    assert [note["sample"] for note in manifest["dropped"]] == ["line 11", "line 12", "line 13"]
    reasons = [note["reason"] for note in manifest["dropped"]]
    assert "not JSON" in reasons[0]
    assert "0 to 255" in reasons[1]
    assert "within 15 tokens" in reasons[2]

    kept, gone = out / f"{names[0]}.ckpt", out / f"{names[1]}.ckpt"
    kept_time = kept.stat().st_mtime_ns
    gone.unlink()
    assert capture_command.main(command) == 0
    assert_matches(read_record(gone), cut[1], live)
    assert kept.stat().st_mtime_ns == kept_time

    capsys.readouterr()
    for change, message in (
        (["--max-length", "14"], "max_length: there 15, here 14"),
        (["--layers", "0,3"], "layers: there"),
        (["--dtype", "bfloat16"], "dtype: there 'float32'"),
    ):
        assert capture_command.main([*command, *change]) == 2
        assert message in capsys.readouterr().err
    with file.open("a") as more:
        more.write("\n")
    assert capture_command.main(command) == 2
    assert "samples_sha256: there" in capsys.readouterr().err


def test_capture_command_stops_past_the_limit(
    live: LiveTarget, client: SGLangClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_samples(tmp_path / "samples.jsonl", [sample(9, 1)], *["[]"] * 3)
    command = ["--target", str(live.path), "--samples", str(file), "--layers", "0,2,4", "--dtype", "float32"]
    command += ["--out", str(tmp_path / "out"), "--server", live.server.url]
    assert capture_command.main([*command, "--max-dropped", "2"]) == 1
    assert re.search(r"3 samples were dropped, more than the 2.*line 4", capsys.readouterr().err)
    assert json.loads((tmp_path / "out/manifest.json").read_text())["complete"] is False
    assert capture_command.main([*command, "--max-dropped", "3"]) == 0
    assert json.loads((tmp_path / "out/manifest.json").read_text())["count"] == 1
