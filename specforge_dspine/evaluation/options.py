"""Options of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from pydantic import field_validator

from specforge_dspine.decoding.sampling import Sampling
from specforge_dspine.evaluation.benchmarks import SYNTAX
from specforge_dspine.utils.cli import ExistingPath, Options, option

Variant = Literal["draft", "unrefined", "untrained"]


class DraftAndTargetOptions(Options):
    """Options of every command that measures a draft with its target."""

    draft: ExistingPath = option("exported draft")
    target: ExistingPath = option("the target's folder")
    out: Path = option("folder of the result")
    limit: int | None = option("prompts of each set (default: all)", default=None, ge=1)
    seed: int = option("of the draws", default=0)
    device: str = option("of both", default="cuda" if torch.cuda.is_available() else "cpu")

    @field_validator("device")
    @classmethod
    def check_device(cls, device: str) -> str:
        """Refuse a device that is not available."""
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:  # torch's ways to say so
            raise ValueError(f"{str(error).splitlines()[0]}; use cpu or cuda") from error
        return device


class EvaluateOptions(DraftAndTargetOptions):
    """What to measure, and how responses are decoded."""

    sets: tuple[str, ...] = option(SYNTAX, metavar="SET")
    server: str | None = option("SGLang server with capture of the draft's layers", default=None, metavar="URL")
    temperature: tuple[float, ...] = option("0 is greedy", default=(0.0,), metavar="T")
    top_p: float = option("of both; 1 keeps all", default=1.0, gt=0, le=1)
    top_k: int = option("of both; 0 keeps all", default=0, ge=0)
    max_new_tokens: int = option("of a response", default=256, ge=2)
    thinking: Literal["on", "off", "none"] = option("the chat template's switch", default="none")
    variant: Variant = option("the draft, without refinement, or as training would start it", default="draft")
    verify_live: int = option("captured responses of each set to decode as well", default=0, ge=0)
    dtype: Literal["bfloat16", "float16", "float32"] | None = option("of both (default: the draft's)", default=None)
    overwrite: bool = option("replace what --out holds, once this is done", default=False)

    @field_validator("temperature")
    @classmethod
    def check_temperatures(cls, temperatures: tuple[float, ...]) -> tuple[float, ...]:
        """Returns different temperatures, as results name them; a ValueError if one is out of range."""
        return tuple(dict.fromkeys(Sampling(float(f"{each:g}")).temperature for each in temperatures))
