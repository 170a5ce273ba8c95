"""Client of SGLang servers: generates from prompts, and captures hidden states.

Token ids go in and token ids come out; nothing is ever encoded or decoded here. Records travel through the server's
capture directory, which must be on a file system that both sides share.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import requests
import torch

from specforge_dspine.streaming.protocol import CAPTURE_DIR_ENV, CAPTURE_KEY, PROTOCOL, mask_to_spans, safe_name
from specforge_dspine.streaming.record import RecordError, Sample, TargetIdentity, check_record, read_record
from specforge_dspine.streaming.verification import CaptureVerificationError, check_facts, check_head
from specforge_dspine.utils.files import read_json
from specforge_dspine.utils.versions import VERSION

CONNECT_TIMEOUT_S = 10.0
PROBE_WAIT_S = 20.0
"""Seconds until a probe's record must be readable; longer means that no file system is shared."""

PROBES = 4
POLL_S = 0.01


class RequestRefused(ValueError):
    """The server understood a request and refused it; the message is the server's."""


@dataclass(frozen=True)
class Completion:
    """What the server generated: ids as returned (a stop token included), and why it ended."""

    output_ids: list[int]
    finish: str  # "stop" or "length"


class _Captured(NamedTuple):
    path: Path
    record: dict[str, torch.Tensor]
    token: int  # the server's greedy next token


class SGLangClient:
    """One server, one thread. Methods raise ``ConnectionError`` without a response, ``RequestRefused`` for a refusal.

    Args:
        url: such as ``http://127.0.0.1:30000``.
        capture_dir: where this machine sees the server's capture directory; by default the path that the server
            itself reports.
        timeout_s: seconds for one HTTP exchange, and for the records of one batch to appear.
    """

    def __init__(self, url: str, *, capture_dir: Path | None = None, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self.capture_dir = capture_dir
        self._timeout_s = timeout_s
        self._session = requests.Session()
        self._session.trust_env = False  # the server shares our disk: never behind a proxy

    def __enter__(self) -> SGLangClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
    ) -> list[Completion]:
        """Continue each prompt by up to ``max_new_tokens`` ids; results are in the order of the prompts.

        A sequence ends at one of the model's own end tokens (its generation config) or at one of ``stop_token_ids``;
        that token is part of ``output_ids``. ``seed`` decides the draws of a server that was started with
        ``--enable-deterministic-inference``.
        """
        sampling = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "stop_token_ids": list(stop_token_ids),
            **({} if seed is None else {"sampling_seed": seed}),
        }
        responses = self._post({"input_ids": list(prompts), "sampling_params": sampling})
        completions = []
        for response in responses:
            reason = response["meta_info"]["finish_reason"]
            if reason["type"] not in ("stop", "length"):
                raise ConnectionError(f"{self.url} aborted a request: {reason}; look at the server's log")
            completions.append(Completion(response["output_ids"], reason["type"]))
        return completions

    def verify_server(self, target: TargetIdentity, lm_head: torch.Tensor, probe_ids: list[int]) -> None:
        """Check, before the first step, that this server's records are what training takes them for.

        ``probe_ids`` and some of its prefixes are captured: the plugin must describe exactly ``target``, the files
        must be readable here and pass ``check_record``, and ``lm_head`` [V, H] must pass ``check_head``.

        Raises:
            CaptureVerificationError: what differs, and what to do about it.
            ValueError: ``lm_head`` or ``probe_ids`` do not fit ``target``.
        """
        if lm_head.shape != (target.vocab_size, target.hidden_size):
            raise ValueError(
                f"lm_head has shape {list(lm_head.shape)}; this target needs "
                f"[{target.vocab_size}, {target.hidden_size}]"
            )
        if len(probe_ids) < PROBES:
            raise ValueError(f"probe_ids has {len(probe_ids)} tokens; give at least {PROBES}")
        lengths = [round(len(probe_ids) * k / PROBES) for k in range(PROBES, 0, -1)]
        probes = [Sample(f"probe{n}", probe_ids[:n], [0] * n) for n in lengths]
        captured: list[_Captured] = []
        for result in self._capture(probes, target, PROBE_WAIT_S):
            if isinstance(result, RecordError):
                raise CaptureVerificationError(f"{self.url}: the probe was not captured: {result.reason}")
            result.path.unlink(missing_ok=True)
            captured.append(result)
        finals = torch.stack([each.record["target_last_hidden_states"][0, -1] for each in captured])
        check_head(self.url, lm_head, finals, [each.token for each in captured], getattr(torch, target.dtype))

    def capture(self, samples: Sequence[Sample], target: TargetIdentity) -> list[Path | RecordError]:
        """Return the records of ``samples``, in their order: a checked file, or why there is none.

        A file is called ``<sample name>.<nonce>.ckpt``, so that no earlier record can be taken for it; whoever gets
        it deletes it after use. A bad record is deleted here.

        Raises:
            CaptureVerificationError: the server at the URL has no plugin any more, or serves another target.
        """
        results = self._capture(samples, target, self._timeout_s)
        return [result if isinstance(result, RecordError) else result.path for result in results]

    def _capture(
        self, samples: Sequence[Sample], target: TargetIdentity, wait_s: float
    ) -> list[_Captured | RecordError]:
        """One exchange for the whole batch, then the files that it promises."""
        if not samples:
            return []
        names = [safe_name(f"{sample.name}.{secrets.token_hex(4)}") for sample in samples]
        strays: list[str] = []
        responses: list[dict[str, Any] | RecordError] = []
        try:
            responses += self._request(samples, names)
        except RequestRefused:
            # One bad sample makes the server refuse the batch, and yet it runs some of the others. All are
            # tried again one by one, under other names: what the first try wrote is nobody's.
            strays, names = names, [safe_name(f"{name}r") for name in names]
            for sample, name in zip(samples, names, strict=True):
                try:
                    responses += self._request([sample], [name])
                except RequestRefused as refused:
                    responses.append(RecordError(sample.name, str(refused)))
        deadline = time.monotonic() + wait_s
        results = [
            response if isinstance(response, RecordError) else self._collect(sample, name, response, target, deadline)
            for sample, name, response in zip(samples, names, responses, strict=True)
        ]
        for name in strays:
            if self.capture_dir is not None:
                (self.capture_dir / f"{name}.ckpt").unlink(missing_ok=True)
        return results

    def _request(self, samples: Sequence[Sample], names: Sequence[str]) -> list[dict[str, Any]]:
        body = {
            "input_ids": [sample.input_ids for sample in samples],
            # A key of its own keeps a request from reusing another one's prefix in a server's cache.
            "extra_key": list(names),
            "sampling_params": [
                {
                    "max_new_tokens": 1,
                    "temperature": 0.0,
                    "custom_params": {
                        CAPTURE_KEY: {
                            "protocol": PROTOCOL,
                            "name": name,
                            "tokens": len(sample.input_ids),
                            "loss_mask": mask_to_spans(sample.loss_mask),
                        }
                    },
                }
                for sample, name in zip(samples, names, strict=True)
            ],
        }
        return self._post(body)

    def _collect(
        self, sample: Sample, name: str, response: dict[str, Any], target: TargetIdentity, deadline: float
    ) -> _Captured | RecordError:
        """Wait for the record that ``response`` promises, and check it."""
        entries = response["meta_info"].get(CAPTURE_KEY)
        if not entries:
            raise CaptureVerificationError(
                f"{self.url}: the plugin did not answer. Is specforge-dspine {VERSION} installed in the "
                f"server's environment and {CAPTURE_DIR_ENV} set? The server's log says which plugins were "
                "loaded. On GPUs the server also needs --disable-prefill-cuda-graph."
            )
        facts: dict[str, Any] = entries[0]
        check_facts(self.url, facts, target)
        if "error" in facts:
            return RecordError(sample.name, facts["error"])
        if self.capture_dir is None:
            self.capture_dir = Path(facts["capture_dir"])
        if not self.capture_dir.is_dir():
            raise CaptureVerificationError(
                f"{self.url}: its capture directory {self.capture_dir} does not exist on this machine; records "
                "travel through files, so both sides must share it (give its path here as stream.capture_dir)"
            )
        path, failure = (self.capture_dir / f"{name}{suffix}" for suffix in (".ckpt", ".error"))
        while not path.is_file():
            if failure.exists():
                reason = read_json(failure)["error"]
                failure.unlink()
                return RecordError(sample.name, f"the server could not write the record: {reason}")
            if time.monotonic() > deadline:
                return RecordError(
                    sample.name,
                    f"{path} did not appear, though the server wrote it to {facts['capture_dir']}. Both sides "
                    "must share that directory (a slow disk also looks like this)",
                )
            time.sleep(POLL_S)
        try:
            record = read_record(path)
            check_record(record, sample, target)
        except RecordError as error:
            path.unlink(missing_ok=True)
            return RecordError(sample.name, error.reason)
        return _Captured(path, record, response["output_ids"][0])

    def _post(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        try:
            response = self._session.post(
                f"{self.url}/generate", json=body, timeout=(CONNECT_TIMEOUT_S, self._timeout_s)
            )
        except requests.RequestException as error:
            raise ConnectionError(
                f"no answer from {self.url} ({type(error).__name__}: {error}). Is the server running there? "
                "Its log says why if it ended; start it again, or correct the URL"
            ) from error
        if response.status_code in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
            raise RequestRefused(f"{self.url}: {response.text.strip()}")
        if not response.ok:
            raise ConnectionError(
                f"{self.url} answered with HTTP status {response.status_code}: {response.text.strip()[:500]}; "
                "look at the server's log"
            )
        return response.json()
