"""The one place that touches SpecForge's private parts, behind a version check.

Each name below has no public counterpart in SpecForge 0.2; everything else in this package uses its seams.
"""

from __future__ import annotations

from specforge_dspine.version import require

require("specforge")

from specforge.algorithms.model_providers import (  # noqa: E402
    _build_dflash_family_model as build_dflash_family_model,
)
from specforge.algorithms.model_providers import build_registered_draft  # noqa: E402
from specforge.cli import _bootstrap_single_process_env as bootstrap_single_process_env  # noqa: E402
from specforge.training.assembly import _optimizer_factory as optimizer_factory  # noqa: E402
from specforge.training.assembly import build_model_bundle  # noqa: E402

__all__ = [
    "bootstrap_single_process_env",
    "build_dflash_family_model",
    "build_model_bundle",
    "build_registered_draft",
    "optimizer_factory",
]
