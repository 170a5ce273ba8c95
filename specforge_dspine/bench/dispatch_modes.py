"""Watching a computation from below autograd: the memory that its operations take, and where its time goes.

Both are dispatch modes: every operation passes through them, the backward pass's and a checkpoint's recomputed ones
included. Memory is what the operations hand out, a kernel's own scratch space is not seen.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Shape = tuple[int, ...]


def tensors_in(*trees: Any) -> Iterator[Tensor]:
    """The tensors anywhere in nested arguments or results."""
    return (leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor))


class Largest(NamedTuple):
    """The largest tensor that was allocated: its ``elements`` and ``shape``, and the ``operation`` that made it."""

    elements: int
    shape: Shape
    operation: str


class Allocations(TorchDispatchMode):
    """Bytes that operations allocated while the mode was on: ``live`` now, ``peak`` at most, ``largest`` at once.

    Views take nothing, nor does what existed before. A tensor counts until the last reference to its storage goes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.largest = Largest(0, (), "")
        # Weak, by identity: a storage's Python object lives exactly as long as the storage itself.
        self._known: dict[int, weakref.finalize[Any, Any]] = {}

    def _note(self, tensor: Tensor, operation: str | None) -> None:
        """Remember the tensor's storage; an ``operation`` made it, None: it was there before."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        size = storage.nbytes() if operation else 0
        self._known[key] = weakref.finalize(storage, self._freed, key, size)
        self.live += size
        self.peak = max(self.peak, self.live)
        if operation and tensor.numel() > self.largest.elements:
            self.largest = Largest(tensor.numel(), tuple(tensor.shape), operation)

    def _freed(self, key: int, size: int) -> None:
        del self._known[key]
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in(args, kwargs):
            self._note(tensor, None)
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._note(tensor, str(func))
        return result

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for finalizer in list(self._known.values()):
            finalizer.detach()  # what outlives the mode is no longer watched


class OperationTimes(TorchDispatchMode):
    """``seconds`` by kind of operation; ``kind`` names it from the operation's name and all its tensors' shapes.

    ``synchronize`` waits for the device, so that an operation's time is its own.
    """

    def __init__(self, kind: Callable[[str, list[Shape]], str], synchronize: Callable[[], None]) -> None:
        super().__init__()
        self.kind = kind
        self.synchronize = synchronize
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self.synchronize()
        elapsed = time.perf_counter() - start
        shapes = [tuple(tensor.shape) for tensor in tensors_in(args, kwargs, result)]
        self.seconds[self.kind(str(func.overloadpacket), shapes)] += elapsed
        return result
