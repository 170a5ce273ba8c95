"""Command lines: options as a pydantic model, parsing, exit status, and messages.

A command declares its options as a subclass of ``Options``, one field each::

    class ExportOptions(Options):
        run: Path | None = option("output_dir of a training run", default=None)
        to: Literal["sglang", "specforge"] = option("layout of the checkpoint")

    main = partial(run_command, Command(ExportOptions, export), module="specforge_dspine.export", doc=__doc__)

``max_length`` becomes ``--max-length``. Tuples take one or more words, and ``bool`` fields are flags. The
annotation's constraints (``gt``, ``ge``, ``Literal``, validators) are the option's range.

Exit status: 0; 1 the work failed; 2 the input is unusable; 128 + N stopped by signal N.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from specforge_dspine.utils.errors import RunError
from specforge_dspine.utils.files import looked_in
from specforge_dspine.utils.signals import Interrupted, signals_as_exceptions

logger = logging.getLogger(__name__)


class Options(BaseModel):
    """Options of a command, checked; never changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def option(
    text: str, *, default: Any = ..., metavar: str | None = None, positional: bool = False, **limits: Any
) -> Any:
    """A field of ``Options``: help text, default (none: required), and limits (``gt``, ``ge``, ``lt``, ``le``)."""
    extra: dict[str, Any] = {"metavar": metavar, "positional": positional}
    return Field(default, description=text, json_schema_extra=extra, **limits)


def parse_ids(text: Any) -> Any:
    """``"1,9,17"`` → ``(1, 9, 17)``; other values as they are."""
    if not isinstance(text, str):
        return text
    try:
        return tuple(int(k) for k in text.split(","))
    except ValueError:
        raise ValueError("give ids separated by commas, as in 1,9,17") from None


def check_exists(path: Path) -> Path:
    """Refuse a file or folder that is not there, and say where it was looked for."""
    if not path.exists():
        raise ValueError(f"no such file or folder{looked_in(path)}")
    return path


IdList = Annotated[tuple[int, ...], BeforeValidator(parse_ids)]
"""Ids in one word, as in 1,9,17."""

ExistingPath = Annotated[Path, AfterValidator(check_exists)]
"""A file or folder that has to be there."""

OptionsType = TypeVar("OptionsType", bound=Options)


def add_options(parser: argparse.ArgumentParser, options: type[Options]) -> None:
    """Add an argument for every field of ``options``; values stay text until ``read_options``."""
    for name, field in options.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        arguments: dict[str, Any] = {"help": help_text(field), "default": argparse.SUPPRESS}
        kinds = [kind for kind in (get_args(field.annotation) or [field.annotation]) if kind is not type(None)]
        is_union = get_origin(field.annotation) in (Union, UnionType)
        kind = kinds[0] if is_union else field.annotation
        if kind is bool:
            parser.add_argument(flag(name), action="store_true", **arguments)
            continue
        if get_origin(kind) is Literal:
            arguments["choices"] = get_args(kind)
        elif get_origin(kind) is tuple and not any(isinstance(each, BeforeValidator) for each in field.metadata):
            arguments["nargs"] = "*" if extra.get("positional") else "+"
        if extra.get("metavar"):
            arguments["metavar"] = extra["metavar"]
        if extra.get("positional"):
            parser.add_argument(name, **arguments)
        else:
            parser.add_argument(flag(name), required=field.is_required(), **arguments)


def flag(name: str) -> str:
    """``max_length`` → ``--max-length``."""
    return "--" + name.replace("_", "-")


def help_text(field: FieldInfo) -> str:
    """The description, and the default where one says something."""
    shown = field.default not in (None, False, PydanticUndefined, ()) and "default" not in (field.description or "")
    default = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    return f"{field.description}{f' (default {default})' if shown else ''}".replace("%", "%%")


def read_options(options: type[OptionsType], values: dict[str, Any]) -> OptionsType:
    """Check parsed ``values``.

    Raises:
        ValueError: a value is out of range; the message names the option, the value, and what would work.
    """
    try:
        return options.model_validate(values)
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            message = problem["msg"].removeprefix("Value error, ")
            place = flag(str(problem["loc"][0])) + f" {problem['input']}: " if problem["loc"] else ""
            problems.append(f"{place}{message[:1].lower()}{message[1:]}")
        raise ValueError("; ".join(problems)) from error


Work = Callable[[Any], str | None]
"""What a command does with its options; returns the text to print."""


@dataclass(frozen=True)
class Command:
    """A command, or one of several subcommands: its options, its work, and one line of help."""

    options: type[Options]
    work: Work
    help: str = ""


def run_command(
    command: Command | Mapping[str, Command],
    argv: Sequence[str] | None = None,
    *,
    module: str,
    doc: str | None,
    expected: tuple[type[Exception], ...] = (ValueError, OSError),
    advice: str | Callable[[Any], str] = "the same command continues",
) -> int:
    """Parse ``argv``, work, and print the result; returns the exit status (see the module's text).

    Args:
        command: what to run; a mapping makes subcommands of its names.
        module: the calling module, as ``python -m`` takes it.
        expected: errors of unusable input; anything else but ``RunError`` keeps its traceback.
        advice: what to do after a signal. A function of the options tells it after a ``RunError`` too.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(command, Command):
        add_options(parser, command.options)
        # Overrides may stand before options, but what follows "--" belongs together.
        values = vars(parser.parse_args(words) if "--" in words else parser.parse_intermixed_args(words))
    else:
        subparsers = parser.add_subparsers(dest="subcommand", required=True)
        for name, each in command.items():
            add_options(subparsers.add_parser(name, help=each.help), each.options)
        values = vars(parser.parse_args(words))
        command = command[values.pop("subcommand")]
    try:
        options = read_options(command.options, values)
    except ValueError as error:
        parser.error(str(error))
    setup_logging()
    try:
        with signals_as_exceptions():
            result = command.work(options)
    except Interrupted as received:
        print(f"stopped by {received}; {advice(options) if callable(advice) else advice}", file=sys.stderr)
        return 128 + received.signum
    except (RunError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        if callable(advice):
            print(f"Fix the error above, then {advice(options)}.", file=sys.stderr)
        return 1
    except expected as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if result is not None:
        print(result, flush=True)
    return 0


def setup_logging() -> None:
    """Log to stderr: rank 0 from INFO on, other ranks from WARNING on."""
    rank = int(os.environ.get("RANK", "0") or 0)
    handler = logging.StreamHandler()  # a new one at each call: tests replace sys.stderr
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"rank {rank}: %(message)s"))
    for name in ("specforge_dspine", "data_prep", "__main__"):  # the last is a command's own module
        package = logging.getLogger(name)
        package.setLevel(logging.INFO if rank == 0 else logging.WARNING)
        package.handlers, package.propagate = [handler], False
