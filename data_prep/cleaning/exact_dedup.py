"""Exact duplicates: keys of millions of rows in at most 16 bytes each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RECENT = 1 << 14  # keys that wait in a Python set, which is quicker for few, before they are sorted in


def normalized(text: str) -> str:
    """The form in which texts are compared: case folded, white space collapsed."""
    return " ".join(text.casefold().split())


class SeenKeys:
    """A set of 64-bit keys.

    Sorted arrays, each at most half as long as the one before: 8 bytes a key, and 8 more while two are merged.
    """

    def __init__(self) -> None:
        self._sorted: list[NDArray[np.uint64]] = []
        self._recent: set[int] = set()

    def known(self, keys: list[int]) -> list[bool]:
        """For each key whether it was added before this call; many at once are cheap."""
        if len(self._recent) >= RECENT:
            self.extend(np.fromiter(self._recent, np.uint64, len(self._recent)))
            self._recent.clear()
        wanted = np.array(keys, np.uint64)
        found = np.array([key in self._recent for key in keys], bool)
        for array in self._sorted:
            places = array.searchsorted(wanted).clip(max=len(array) - 1)
            found |= array[places] == wanted
        return found.tolist()

    def is_new(self, key: int) -> bool:
        """Whether a key that ``known`` did not know was not added since, either."""
        return key not in self._recent

    def add(self, key: int) -> None:
        """Adds a key."""
        self._recent.add(key)

    def extend(self, keys: NDArray[np.uint64]) -> None:
        """Adds keys that are new and different from each other."""
        if not len(keys):
            return
        self._sorted.append(keys)
        del keys
        while len(self._sorted) > 1 and 2 * len(self._sorted[-1]) > len(self._sorted[-2]):
            self._sorted[-2:] = [np.concatenate(self._sorted[-2:])]
        self._sorted[-1].sort()
