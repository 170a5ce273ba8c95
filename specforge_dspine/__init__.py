"""DSpine drafts for speculative decoding, trained inside SpecForge from a live SGLang server.

Shape legend, used in every docstring of this package (the paper's letters):

    R  sequences in a micro-batch          H  hidden size (target and draft)
    S  tokens of a sequence                T  tapped target layers
    N  anchors (blocks) per sequence       V  vocabulary rows of the LM head
    B  block size: 1 anchor + M proposals  r  transfer rank
    M  proposals, M = B − 1                a  message size
    L  draft layers                        K  candidates per position

"§n" in a docstring names the section of ``docs/method.md`` that holds the equation.
"""

import warnings

from specforge_dspine.utils.versions import VERSION as __version__

# SpecForge imports its EAGLE drafts beside ours, and they warn; no DSpine code path has a use for flash_attn.
warnings.filterwarnings("ignore", message="flash_attn is not found, falling back to flex_attention")

__all__ = ["__version__"]
