"""Dispatch modes that watch a computation below autograd: the memory its operations allocate, and their time.

Every operation passes through them, also those of the backward pass and of recomputed checkpoints. Memory is what
the operations return; a kernel's own scratch space is not seen.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Shape = tuple[int, ...]


def tensors_in(*trees: Any) -> Iterator[Tensor]:
    """The tensors anywhere in nested arguments or results."""
    return (leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor))


class Allocations(TorchDispatchMode):
    """Bytes that operations allocate: ``live`` now, ``peak`` at most; and the most elements of a tensor, ``largest``.

    Views and earlier tensors do not count. A tensor counts until the last reference to its storage is gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        # Weak, by identity: a storage's Python object lives exactly as long as the storage itself.
        self._known: dict[int, weakref.finalize[Any, Any]] = {}

    def _register(self, tensor: Tensor, *, allocated: bool) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        size = storage.nbytes() if allocated else 0
        self._known[key] = weakref.finalize(storage, self._freed, key, size)
        self.live += size
        self.peak = max(self.peak, self.live)
        if allocated:
            self.largest = max(self.largest, tensor.numel())

    def _freed(self, key: int, size: int) -> None:
        del self._known[key]
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in(args, kwargs):
            self._register(tensor, allocated=False)
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._register(tensor, allocated=True)
        return result

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for finalizer in list(self._known.values()):
            finalizer.detach()  # stop watching what outlives the mode


class OperationTimes(TorchDispatchMode):
    """``seconds`` by kind of operation; ``kind`` names it from the operation's name and all its tensors' shapes.

    ``synchronize`` waits for the device, so that an operation's time is its own.
    """

    def __init__(self, kind: Callable[[str, list[Shape]], str], synchronize: Callable[[], None]) -> None:
        super().__init__()
        self.kind, self.synchronize = kind, synchronize
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self.synchronize()
        elapsed = time.perf_counter() - start
        shapes = [tuple(tensor.shape) for tensor in tensors_in(args, kwargs, result)]
        self.seconds[self.kind(str(func.overloadpacket), shapes)] += elapsed
        return result
