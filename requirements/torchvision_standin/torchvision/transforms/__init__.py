from enum import Enum

from torchvision import stand_in as __getattr__  # noqa: F401

# transformers builds a table of these names when it is imported.
InterpolationMode = Enum(
    "InterpolationMode", ["NEAREST", "NEAREST_EXACT", "BOX", "BILINEAR", "HAMMING", "BICUBIC", "LANCZOS"]
)

from torchvision.transforms import functional, v2  # noqa: E402, F401
