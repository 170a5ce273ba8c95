"""Near duplicates: MinHash signatures from datasketch, and an index of them on disk.

The probability that two sets have the same least hash under a random permutation is their Jaccard similarity
J = |A ∩ B| / |A ∪ B|, so that the share of equal entries among P permutations estimates J. Signatures are cut into
b bands of r; texts that agree in a whole band, with probability 1 − (1 − Jʳ)ᵇ, are compared entry by entry.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cache

import numpy as np
import xxhash
from datasketch import MinHash, MinHashLSH

from data_prep.cleaning.decontamination import PIECE

PERMUTATIONS = 128
SHINGLE_WORDS = 3  # consecutive words that are one element of a text's set
MOST_BANDED = 0.98  # the highest similarity with two bands or more; above it, what these find is compared as well
SCHEMA = """
CREATE TABLE IF NOT EXISTS signatures (number INTEGER PRIMARY KEY, place TEXT, signature BLOB);
CREATE TABLE IF NOT EXISTS bands (band INTEGER, number INTEGER, PRIMARY KEY (band, number)) WITHOUT ROWID;
"""


def signature(text: str) -> bytes:
    """The MinHash of a normalized text's word triples: uint32 [P]."""
    words = PIECE.findall(text)
    shingles = {" ".join(words[k : k + SHINGLE_WORDS]) for k in range(max(1, len(words) - SHINGLE_WORDS + 1))}
    sketch = _empty().copy()
    sketch.update_batch([shingle.encode() for shingle in shingles])
    return np.asarray(sketch.digest(), np.uint32).tobytes()


@cache
def _empty() -> MinHash:
    """With the permutations, which are the same for every text: drawing them takes longer than using them."""
    return MinHash(PERMUTATIONS, hashfunc=xxhash.xxh32_intdigest)


class NearIndex:
    """Signatures of the rows kept so far, in tables of ``db``; from ``threshold`` on a similarity is near."""

    def __init__(self, db: sqlite3.Connection, threshold: float) -> None:
        split = MinHashLSH(threshold=min(threshold, MOST_BANDED), num_perm=PERMUTATIONS)  # which bands suit it
        self._bands, self._rows = split.b, split.r
        self._threshold, self._db = threshold, db
        db.executescript(SCHEMA)

    def find(self, wanted: bytes) -> tuple[str, float] | None:
        """Where the most similar row kept so far is, if it is similar enough, and how similar."""
        marks = ",".join("?" * self._bands)
        query = f"SELECT DISTINCT number FROM bands WHERE band IN ({marks})"
        mine = np.frombuffer(wanted, np.uint32)
        best: tuple[str, float] | None = None
        for (number,) in self._db.execute(query, self._keys(wanted)).fetchall():
            place, theirs = self._db.execute(
                "SELECT place, signature FROM signatures WHERE number = ?", (number,)
            ).fetchone()
            similarity = float((mine == np.frombuffer(theirs, np.uint32)).mean())
            if similarity >= self._threshold and (best is None or similarity > best[1]):
                best = place, similarity
        return best

    def add(self, place: str, kept: bytes) -> None:
        """Adds a row's signature."""
        number = self._db.execute("INSERT INTO signatures VALUES (NULL, ?, ?)", (place, kept)).lastrowid
        self._db.executemany("INSERT OR IGNORE INTO bands VALUES (?, ?)", ((key, number) for key in self._keys(kept)))

    def _keys(self, kept: bytes) -> Sequence[int]:
        """A number for each band and its content, which SQLite can hold: 63 bits."""
        size = 4 * self._rows
        return [xxhash.xxh3_64_intdigest(kept[k * size : (k + 1) * size], seed=k) >> 1 for k in range(self._bands)]
