"""Parts that all commands share: options, the ledger of their output, and the end of a job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.readers.inputs import Inputs
from specforge_dspine.utils.cli import Options, option
from specforge_dspine.utils.ledger import Ledger

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SHOWN_REASONS = 12


class JobOptions(Options):
    """Options of every command that turns rows into a file."""

    input: tuple[str, ...] = option(
        "files (.json, .jsonl, .parquet; .gz, .zst), folders, packages (chatterbot, reasoning-gym, ...), hub names",
        metavar="FILE|DIR|NAME",
    )
    output: Path = option("file to write", metavar="FILE")
    limit: int | None = option("rows to take at most (default: all)", default=None, ge=1, metavar="N")
    overwrite: bool = option("replace what is there, once this is done", default=False)


def load_target(path: Path) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """The text config and the tokenizer of the target in the folder ``path``, which must exist."""
    from transformers import AutoConfig, AutoTokenizer

    if not path.is_dir():
        raise ValueError(f"--target {path}: no such directory (download the target first)")
    return AutoConfig.from_pretrained(path).get_text_config(), AutoTokenizer.from_pretrained(path)


def run_job(
    command: str,
    options: JobOptions,
    inputs: Inputs,
    depends: Mapping[str, Any],
    work: Callable[[Ledger], Mapping[str, Any]],
    *,
    reads: Sequence[str] = (),
    more_outputs: Sequence[Path] = (),
    replaces_own: bool = False,
) -> str:
    """Do ``work``, or find it done; returns a sentence about the output.

    Args:
        depends: what decides the output beside the inputs and the limit, with the command's ``format_version``.
        work: gets the opened ledger and returns facts for the summary, among them ``rows_in``.
        reads: names of what is read beside ``--input``.
        more_outputs: files beside ``--output``; none may be read or written twice.
        replaces_own: whether a finished output of the same command is made again.
    """
    files = [each.name for each in inputs.found]
    roots = [Path(name) for name in options.input if Path(name).is_dir()]
    parents = {parent for name in files for parent in Path(name).parents}
    folders = [str(parent) for parent in parents if any(root in parent.parents for root in roots)]
    ledger = Ledger(
        [options.output, *more_outputs],
        command,
        {"limit": options.limit, **depends, "files": inputs.identities},
        reads=[*(name for name in options.input if Path(name).exists()), *files, *folders, *reads],
        overwrite=options.overwrite,
    )
    ledger.overwrite |= replaces_own and ledger.is_own()
    if ledger.is_finished():
        return f"{ledger.output} is there already, made from these very inputs"
    for path in inputs.ignored:
        logger.info("not read: %s", path)
    with ledger:
        ended = ledger.ended()
        if ended is None:
            facts = dict(work(ledger))
            ended = {"rows_in": facts.pop("rows_in"), "rows_kept": facts.pop("rows_kept", None), "facts": facts}
        summary = ledger.finish(**ended)
    dropped = summary["rows_dropped"]
    for reason, number in list(dropped.items())[:SHOWN_REASONS]:
        logger.info("dropped %d: %s", number, reason)
    if dropped:
        logger.info("every dropped row with its line: %s", ledger.dropped_path)
    if "rows_by_file" not in summary:
        return f"{summary['rows_in']} rows read, {summary['rows_kept']} of them good; see {ledger.output}"
    kept = ", ".join(f"{number} in {name}" for name, number in summary["rows_by_file"].items())
    return f"{summary['rows_in']} rows read, {summary['rows_kept']} kept ({kept})"
