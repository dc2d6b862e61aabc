"""A checkpoint as it lies on disk: what is in it, where, and whether it is what its config says. No MLX here.

Entry points: `open_checkpoint` for use, `inspect_checkpoint` for `show`.
"""

from mlx_flashnext.checkpoint.opening import Inspection, inspect_checkpoint, open_checkpoint
from mlx_flashnext.checkpoint.stored import (
    BLOCK_SCALES,
    AccountLine,
    Checkpoint,
    Component,
    ExpertLayout,
    Layout,
    NgramLayout,
    Projection,
    StoredTensor,
)

__all__ = [
    "BLOCK_SCALES",
    "AccountLine",
    "Checkpoint",
    "Component",
    "ExpertLayout",
    "Inspection",
    "Layout",
    "NgramLayout",
    "Projection",
    "StoredTensor",
    "inspect_checkpoint",
    "open_checkpoint",
]
