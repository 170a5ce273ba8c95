"""Fixtures that several test files share: tiny targets, and one real SGLang server on the CPU per target."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specforge_dspine.streaming.client import SGLangClient
from specforge_dspine.streaming.record import TargetIdentity
from specforge_dspine.streaming.server import ManagedServer
from tests.support.targets import BUILDERS

torch.set_num_threads(1)  # servers and tests share few cores

TAPS = (0, 2, 4)


@dataclass(frozen=True)
class LiveTarget:
    """A tiny target, its reference in transformers (float32), and a server that serves it."""

    path: Path
    identity: TargetIdentity
    model: PreTrainedModel
    server: ManagedServer

    @property
    def head(self) -> torch.Tensor:
        """E [V, H]."""
        return self.model.get_output_embeddings().weight.detach()

    def states(self, input_ids: list[int], taps: tuple[int, ...] = TAPS) -> tuple[torch.Tensor, torch.Tensor]:
        """What transformers computes: tapped outputs [1, S, T·H] and post-norm final state [1, S, H]."""
        with torch.no_grad():
            out = self.model.model(torch.tensor([input_ids]), output_hidden_states=True)
        return torch.cat([out.hidden_states[k + 1] for k in taps], dim=-1), out.last_hidden_state


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Returns once ``condition`` holds; fails the test if that takes longer than ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {seconds} s"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def target_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of the tiny targets, by the names in ``targets.BUILDERS``."""
    root = tmp_path_factory.mktemp("targets")
    return {name: build(root / name) for name, build in BUILDERS.items()}


@pytest.fixture(scope="module", params=sorted(BUILDERS))
def live(
    request: pytest.FixtureRequest, target_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveTarget]:
    """A running server with capture of layers ``TAPS``, for each target in turn."""
    path = target_dirs[request.param]
    identity = TargetIdentity.from_config(str(path), TAPS, "float32")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    run_dir = tmp_path_factory.mktemp(f"server-{request.param}")
    with ManagedServer(str(path), run_dir, TAPS, dtype="float32") as server:
        yield LiveTarget(path, identity, model, server)
    assert not server.alive()
    assert not server.spool.exists()


@pytest.fixture
def client(live: LiveTarget) -> Iterator[SGLangClient]:
    with SGLangClient(live.server.url, timeout_s=60) as connected:
        yield connected
    # Whatever a test captured, it also has to have consumed.
    assert not list(live.server.spool.iterdir())
