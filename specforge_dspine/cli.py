"""Console script: ``specforge-dspine COMMAND ...`` runs ``python -m specforge_dspine.COMMAND ...``.

    specforge-dspine train --recipe recipes/smollm2_cpu.yaml
    specforge-dspine --help | --version

Command modules are loaded by name when they run: ``--help`` imports no torch. ``torchrun -m`` takes the modules.
"""

from __future__ import annotations

import difflib
import runpy
import sys
from collections.abc import Sequence

from specforge_dspine.utils.errors import RunError
from specforge_dspine.utils.versions import SUPPORTED, VERSION, installed

COMMANDS = {  # subcommand: (module below specforge_dspine, description)
    "train": ("train", "train a draft from a recipe"),
    "capture": ("capture", "capture features of samples, for offline training and held-out metrics"),
    "serve-capture": ("streaming.server", "serve a target with capture enabled, for stream.servers"),
    "export": ("export", "write a checkpoint in SGLang's or SpecForge's layout"),
    "evaluate": ("evaluate", "measure acceptance length, the target verifying every round"),
    "report": ("report", "compare evaluations in one table and picture"),
    "demo": ("demo", "prepare data, train, export and evaluate with SmolLM2-135M-Instruct on a CPU"),
    "ablate": ("ablate", "train and evaluate variants of a recipe on the same data and seeds"),
    "studies": ("studies", "measure what a draft's layers know, and when they need it"),
    "bench": ("bench", "time training steps and decoding rounds"),
    "curves": ("curves", "record or check reference training curves"),
    "conformance": ("conformance", "compare this installation with float64 vectors"),
}


def usage() -> str:
    """Returns the text of ``--help``."""
    lines = [f"  {name:15}{description}" for name, (_, description) in COMMANDS.items()]
    lines += ["", "Options of a command: specforge-dspine COMMAND --help. Data: python -m data_prep.prompts --help."]
    return "\n".join(["usage: specforge-dspine [--help | --version] COMMAND [OPTIONS]", "", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, whose exit status passes through as ``SystemExit``; returns 2 where there is no such command."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("-h", "--help"):
        print(usage())
    elif name == "--version":
        hosts = ", ".join(f"{host} {installed(host) or 'not installed'}" for host in SUPPORTED)
        print(f"specforge-dspine {VERSION} ({hosts})")
    elif name in COMMANDS:
        sys.argv[1:] = rest
        try:
            runpy.run_module(f"specforge_dspine.{COMMANDS[name][0]}", run_name="__main__", alter_sys=True)
        except RunError as error:  # at its imports: an unsupported host
            print(f"error: {error}", file=sys.stderr)
            return 1
    else:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        print(f"error: {name}: no such command; did you mean {near[0]}?" if near else usage(), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
