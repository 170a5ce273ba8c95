"""Sections that check results: shapes at Qwen3-8B's sizes, conformance and attention on the device."""

from __future__ import annotations

from pathlib import Path

import torch

from specforge_dspine.bench.models import SIZES, Bench
from specforge_dspine.bench.section import Plan, Section
from specforge_dspine.bench.step_timing import draft_output
from specforge_dspine.conformance.checks import conformance

VECTORS = Path(__file__).parents[2] / "tests" / "golden"  # of a checkout
ATTENTION_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1}  # of the two kernels, relative to the largest


def shapes_section(_plan: Plan) -> Section:
    """Parameter counts and the forward's shapes at Qwen3-8B's sizes, on the meta device."""
    section, bench = Section(), Bench(SIZES["qwen3_8b"], torch.device("meta"), "sdpa")
    draft = bench.model.draft_model
    total = sum(parameter.numel() for parameter in draft.parameters())
    section.add("draft parameters", total, note="Qwen3-8B's sizes")
    section.add("injection parameters", draft.num_injection_parameters(), note="of these")
    section.add("code table", draft.transfer_codes.numel() * 4 / 2**30, "GiB", "float32, fixed")
    outputs = draft_output(bench.model, bench.inputs())._asdict()
    section.raw = {name: list(value.shape) for name, value in outputs.items() if value is not None}
    return section


def conformance_section(plan: Plan) -> Section:
    """The conformance check of every vector file, on the device, in float32 and bfloat16."""
    section = Section()
    files = sorted(VECTORS.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{VECTORS} holds no vector files; run from a checkout")
    for file in files:
        for dtype in (torch.float32, torch.bfloat16):
            checks = conformance(file, dtype, plan.bench.device)
            wrong = [check.name for check in checks if not check.ok]
            worst = max(checks, key=lambda check: check.error / max(check.tolerance, 1e-12))
            name = f"{file.stem} in {str(dtype).removeprefix('torch.')}"
            section.raw[name] = {"errors": {check.name: check.error for check in checks}, "mismatches": wrong}
            note = f"of {len(checks)} agree; nearest to its tolerance: {worst.name}"
            note += f"; MISMATCH: {', '.join(wrong)}" if wrong else ""
            section.add(name, len(checks) - len(wrong), note=note)
            section.failed |= bool(wrong)
    return section


def attention_section(plan: Plan) -> Section:
    """FlexAttention and its block mask against dense attention, through the whole draft."""
    section, bench = Section(), plan.bench
    cuda = bench.device.type == "cuda"
    inputs = bench.inputs()
    outputs = []
    # On a CPU FlexAttention runs forward only, and compiling it there would take longer than everything else.
    with torch.set_grad_enabled(cuda), torch.compiler.set_stance("default" if cuda else "force_eager"):
        for backend in ("flex_attention", "sdpa"):
            with bench.attention_backend(backend):
                outputs.append(draft_output(bench.model, inputs).hidden.detach().float())
    flex, dense = outputs
    error = float((flex - dense).abs().max() / dense.abs().max())
    allowed = ATTENTION_TOLERANCE[bench.sizes.dtype]
    section.failed = not error <= allowed
    note = f"of the final states, relative to the largest; allowed {allowed:.0e}"
    section.add("flex_attention against sdpa", error, note=f"{'MISMATCH: ' if section.failed else ''}{note}")
    return section
