"""Version of this package, and the supported versions of its two hosts, SpecForge and SGLang."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from specforge_dspine.utils.errors import RunError

VERSION = "0.1.0"

# Private names of both hosts are used (training/specforge_internals.py, streaming/plugin.py): a window, not a floor.
SUPPORTED = {"specforge": ">=0.2,<0.3", "sglang": ">=0.5.14,<0.6"}


def installed(distribution: str) -> str | None:
    """Returns the installed version of ``distribution``, None if there is none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def require(distribution: str) -> str:
    """Returns the installed version of ``distribution``, "specforge" or "sglang", if it is supported.

    Raises:
        RunError: it is not installed, or its version is outside the window in ``SUPPORTED``.
    """
    found, window = installed(distribution), SUPPORTED[distribution]
    if found is None or found not in SpecifierSet(window, prereleases=True):
        state = "is not installed" if found is None else f"{found} is not supported"
        raise RunError(
            f"{distribution} {state}: specforge-dspine {VERSION} works with {distribution}{window}; "
            f'pip install "{distribution}{window}"'
        )
    return found
