"""What decides an output beside its inputs: the code, and how a target's chats are rendered and encoded."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from specforge_dspine.utils.chat_template import SHORT
from specforge_dspine.utils.files import file_sha256


@cache
def code_version() -> str:
    """A hash over all modules here: with a changed rule it is another job."""
    total = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        total.update(f"{path.name} {file_sha256(path)}\n".encode())
    return total.hexdigest()[:SHORT]
