"""Talks to SGLang servers: generates answers, proves that a server's capture can be trusted, captures.

Token ids go in and token ids come out; nothing is ever encoded or decoded here. Records travel through
the server's capture directory, which must be on a file system that both sides share.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from http import HTTPStatus
from pathlib import Path
from typing import Any

import requests
import torch

from specforge_dspine.streaming.record import (
    CAPTURE_DIR_ENV,
    CAPTURE_KEY,
    PROTOCOL,
    RecordError,
    Sample,
    TargetIdentity,
    check_record,
    mask_to_spans,
    read_record,
    safe_name,
)
from specforge_dspine.utils.versions import VERSION

CONNECT_TIMEOUT_S = 10.0
PROBE_WAIT_S = 20.0
"""Seconds until a probe's record must be readable; longer means that no file system is shared."""

PROBES = 4
HEAD_CHUNK_ROWS = 16384
POLL_S = 0.01


class CaptureVerificationError(RuntimeError):
    """The server's capture cannot be trusted; the message says what differs and what to do."""


class RequestRefused(ValueError):
    """The server understood a request and refused it; the message is the server's."""


@dataclass(frozen=True)
class Completion:
    """What the server generated: ids as returned (a stop token included), and why it ended."""

    output_ids: list[int]
    finish: str  # "stop" or "length"


@dataclass(frozen=True)
class ServerFacts:
    """A server that passed :meth:`SGLangClient.verify_server`."""

    url: str
    version: str
    capture_dir: Path
    target: TargetIdentity


@dataclass(frozen=True)
class _Captured:
    path: Path
    token: int  # the server's greedy next token


class SGLangClient:
    """One server, one thread.

    Args:
        url: such as ``http://127.0.0.1:30000``.
        capture_dir: where this machine sees the server's capture directory; by default the path that the
            server itself reports.
        timeout_s: seconds for one HTTP exchange, and for the records of one batch to appear.

    Every method raises ``ConnectionError`` if the server does not answer, and :class:`RequestRefused` if
    it refuses what was sent.
    """

    def __init__(self, url: str, *, capture_dir: Path | None = None, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self.capture_dir = capture_dir
        self._timeout_s = timeout_s
        self._session = requests.Session()
        self._session.trust_env = False  # the server shares our disk: never behind a proxy

    def close(self) -> None:
        """Close the connection."""
        self._session.close()

    def __enter__(self) -> SGLangClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
    ) -> list[Completion]:
        """Continues each prompt by up to ``max_new_tokens`` ids; results are in the order of the prompts.

        ``seed`` decides the draws of a server that was started with ``--enable-deterministic-inference``.

        A sequence ends at one of the model's own end tokens (its generation config) or at one of
        ``stop_token_ids``; that token is part of ``output_ids``.
        """
        sampling = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "stop_token_ids": list(stop_token_ids),
            **({} if seed is None else {"sampling_seed": seed}),
        }
        answers = self._generate({"input_ids": list(prompts), "sampling_params": sampling})
        return [Completion(answer["output_ids"], self._finish(answer)) for answer in answers]

    def verify_server(self, target: TargetIdentity, lm_head: torch.Tensor, probe_ids: list[int]) -> ServerFacts:
        """Proves, before the first step, that this server's records are what training takes them for.

        Captured are ``probe_ids`` and some of its prefixes, under fresh names: the plugin must answer with
        our protocol and version and describe exactly ``target``; the files must be readable here and pass
        ``check_record``; and ``lm_head`` [V, H], applied to the final state of each probe's last token,
        must choose the token that the server chose (TorchSpec#169: states from before the final norm
        pass every other check).

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
        chosen: list[tuple[torch.Tensor, int]] = []
        for probe, captured in zip(probes, self._capture(probes, target, PROBE_WAIT_S), strict=True):
            if isinstance(captured, RecordError):
                raise CaptureVerificationError(f"{self.url}: the probe was not captured: {captured.reason}")
            try:
                tensors = read_record(captured.path)
                check_record(tensors, probe, target)
            except RecordError as error:
                raise CaptureVerificationError(f"{self.url}: a wrong probe record: {error.reason}") from error
            finally:
                captured.path.unlink(missing_ok=True)
            chosen.append((tensors["target_last_hidden_states"][0, -1], captured.token))
        self._prove_head(lm_head, chosen, target)
        assert self.capture_dir is not None  # the first capture set it
        return ServerFacts(self.url, VERSION, self.capture_dir, target)

    def capture(self, samples: Sequence[Sample], target: TargetIdentity) -> list[Path | RecordError]:
        """Records of ``samples``, in their order: a checked file, or why there is none.

        A file is called ``<sample name>.<nonce>.ckpt``, so that no earlier record can be taken for it;
        whoever gets it deletes it after use. A bad record is deleted here.

        Raises:
            CaptureVerificationError: the server behind the URL has no plugin any more, or serves another target.
        """
        results: list[Path | RecordError] = []
        for sample, captured in zip(samples, self._capture(samples, target, self._timeout_s), strict=True):
            if isinstance(captured, RecordError):
                results.append(captured)
                continue
            try:
                check_record(read_record(captured.path), sample, target)
                results.append(captured.path)
            except RecordError as error:
                captured.path.unlink(missing_ok=True)
                results.append(RecordError(sample.name, error.reason))
        return results

    def _capture(
        self, samples: Sequence[Sample], target: TargetIdentity, wait_s: float
    ) -> list[_Captured | RecordError]:
        """One exchange for the whole batch, then the files that it promises."""
        if not samples:
            return []
        names = [safe_name(f"{sample.name}.{secrets.token_hex(4)}") for sample in samples]
        strays: list[str] = []
        answers: list[dict[str, Any] | RecordError] = []
        try:
            answers += self._request(samples, names)
        except RequestRefused:
            # One bad sample makes the server refuse the batch, and yet it runs some of the others. All are
            # tried again one by one, under other names: what the first try wrote is nobody's.
            strays, names = names, [safe_name(f"{name}r") for name in names]
            answers += [self._request_one(sample, name) for sample, name in zip(samples, names, strict=True)]
        deadline = time.monotonic() + wait_s
        results = [
            answer if isinstance(answer, RecordError) else self._collect(sample, name, answer, target, deadline)
            for sample, name, answer in zip(samples, names, answers, strict=True)
        ]
        for name in strays:
            if self.capture_dir is not None:
                (self.capture_dir / f"{name}.ckpt").unlink(missing_ok=True)
        return results

    def _request_one(self, sample: Sample, name: str) -> dict[str, Any] | RecordError:
        try:
            return self._request([sample], [name])[0]
        except RequestRefused as refused:
            return RecordError(sample.name, str(refused))

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
        return self._generate(body)

    def _collect(
        self, sample: Sample, name: str, answer: dict[str, Any], target: TargetIdentity, deadline: float
    ) -> _Captured | RecordError:
        """Waits for the record that ``answer`` promises."""
        entries = answer["meta_info"].get(CAPTURE_KEY)
        if not entries:
            raise CaptureVerificationError(
                f"{self.url}: the plugin did not answer. Is specforge-dspine {VERSION} installed in the "
                f"server's environment and {CAPTURE_DIR_ENV} set? The server's log says which plugins were "
                "loaded. On GPUs the server also needs --disable-prefill-cuda-graph."
            )
        facts: dict[str, Any] = entries[0]
        self._prove_facts(facts, target)
        if "error" in facts:
            return RecordError(sample.name, facts["error"])
        directory = self._directory(facts)
        path, failure = (directory / f"{name}{suffix}" for suffix in (".ckpt", ".error"))
        while not path.is_file():
            if failure.exists():
                reason = json.loads(failure.read_text())["error"]
                failure.unlink()
                return RecordError(sample.name, f"the server could not write the record: {reason}")
            if time.monotonic() > deadline:
                return RecordError(
                    sample.name,
                    f"{path} did not appear, though the server wrote it to {facts['capture_dir']}. Both sides "
                    "must share that directory (a slow disk also looks like this)",
                )
            time.sleep(POLL_S)
        return _Captured(path, answer["output_ids"][0])

    def _prove_facts(self, facts: dict[str, Any], target: TargetIdentity) -> None:
        ours = {"protocol": PROTOCOL, "version": VERSION}
        for key, value in ours.items():
            if facts.get(key, value) != value:
                raise CaptureVerificationError(
                    f"{self.url}: the plugin's {key} is {facts[key]!r}, ours is {value!r}; install "
                    f"specforge-dspine {VERSION} in the server's environment and restart it"
                )
        if "layers" not in facts:  # refused before the model was loaded
            return
        for field in fields(TargetIdentity):
            expected, found = getattr(target, field.name), facts[field.name]
            if field.name == "layers":
                found = tuple(found)
            if field.name == "model_path" and _same_path(expected, found):
                continue
            if expected != found:
                raise CaptureVerificationError(
                    f"{self.url}: the server's {field.name} is {found!r}, this run needs {expected!r}; "
                    "restart the server for this target and these layers, or correct the recipe"
                )

    def _directory(self, facts: dict[str, Any]) -> Path:
        if self.capture_dir is None:
            self.capture_dir = Path(facts["capture_dir"])
        if not self.capture_dir.is_dir():
            raise CaptureVerificationError(
                f"{self.url}: its capture directory {self.capture_dir} does not exist on this machine; records "
                "travel through files, so both sides must share it (say where it is mounted here)"
            )
        return self.capture_dir

    def _prove_head(
        self, lm_head: torch.Tensor, chosen: list[tuple[torch.Tensor, int]], target: TargetIdentity
    ) -> None:
        """Each server token must be the head's best one, up to rounding, and one beyond any rounding."""
        states = torch.stack([state for state, _ in chosen]).float()  # [probes, H]
        rows = lm_head.split(HEAD_CHUNK_ROWS)  # never a second float32 copy of the head
        logits = torch.cat([states @ part.float().T.to(states.device) for part in rows], dim=-1)
        top = logits.topk(2, dim=-1).values
        # The server rounds its logits to the model's dtype, so two within a few units are a tie.
        tolerance = (4 * torch.finfo(getattr(torch, target.dtype)).eps * top[:, 0].abs()).clamp(min=1e-3)
        clear = 0
        for row, (_, token) in enumerate(chosen):
            short = float(top[row, 0] - logits[row, token])
            if short > float(tolerance[row]):
                raise CaptureVerificationError(
                    f"{self.url}: the server chose token {token} after a probe, but LM head × captured final "
                    f"state prefers {int(logits[row].argmax())} by {short:.3g}: the head is not this target's, "
                    "or the states are not those after its final norm. Check the target's path and revision"
                )
            clear += float(top[row, 0] - top[row, 1]) > float(tolerance[row])
        if not clear:
            raise CaptureVerificationError(
                f"{self.url}: after all {len(chosen)} probes the two best tokens tie within rounding, which "
                "proves nothing; use another probe prompt"
            )

    def _finish(self, answer: dict[str, Any]) -> str:
        reason = answer["meta_info"]["finish_reason"]
        if reason["type"] not in ("stop", "length"):
            raise ConnectionError(f"{self.url} aborted a request: {reason}; look at the server's log")
        return reason["type"]

    def _generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
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


def _same_path(a: str, b: str) -> bool:
    return Path(a).exists() and Path(b).exists() and Path(a).resolve() == Path(b).resolve()
