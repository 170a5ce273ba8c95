"""Names that SGLang imports and that a text-only server never calls.

PyPI's torchvision does not import beside a CPU build of torch. Any call raises.
"""

from importlib import import_module


class _NotHere:
    def __init__(self, *args, **kwargs):
        raise RuntimeError("this is the CPU stand-in for torchvision: image input is not available")


def stand_in(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_NotHere,), {})


__getattr__ = stand_in
for _module in ("io", "transforms"):
    import_module(f"{__name__}.{_module}")
