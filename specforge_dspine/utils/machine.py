"""Hardware and versions that a measurement depends on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from specforge_dspine.utils.versions import VERSION, installed


def processor() -> str:
    """The CPU's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine(device: torch.device) -> dict[str, Any]:
    """Hardware, load and versions, as a measurement reports them."""
    facts: dict[str, Any] = {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "specforge_dspine": VERSION,
    }
    for name in ("transformers", "triton", "specforge"):
        facts[name] = installed(name)
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
        facts["gpu_memory"] = torch.cuda.get_device_properties(device).total_memory
    return facts
