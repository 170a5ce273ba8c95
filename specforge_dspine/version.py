"""Our version, and the versions of the two hosts that this release was written against."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

VERSION = "0.1.0"

# Private seams of both hosts are used (see host.py and stream/plugin.py), so a window, not a floor.
SUPPORTED = {"specforge": ">=0.2,<0.3", "sglang": ">=0.5.14,<0.6"}


def require(distribution: str) -> str:
    """The installed version of ``distribution`` ("specforge" or "sglang").

    Raises:
        RuntimeError: it is not installed, or its version is outside the window in ``SUPPORTED``.
    """
    window = SUPPORTED[distribution]
    try:
        found = version(distribution)
    except PackageNotFoundError:
        raise RuntimeError(
            f"{distribution} is not installed; specforge-dspine {VERSION} needs {distribution}{window}"
        ) from None
    if found not in SpecifierSet(window, prereleases=True):
        raise RuntimeError(
            f"{distribution} {found} is not supported by specforge-dspine {VERSION}, which works with "
            f"{distribution}{window}: install such a version"
        )
    return found
