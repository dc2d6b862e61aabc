"""Parameters that training begins with: the new parts of DFlash2 do nothing yet.

Entry point: `initial_parameters`. Numpy, so that trainers of any framework begin alike.

Source: dflash2.md 5.4.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from drafter.config import DraftConfig, expected_tensors

CODEBOOK_SCALE = 0.02


def initial_parameters(config: DraftConfig, seed: int) -> dict[str, NDArray[np.float32]]:
    """Return float32 parameters by checkpoint name.

    Norms are one, convolutions the identity, and what the selector adds is zero: its successor table is, the
    predecessor table is small. Linear weights are normal with the square root of their width as divisor.
    """
    generator = np.random.default_rng(seed)
    found: dict[str, NDArray[np.float32]] = {}
    for name, shape in expected_tensors(config).items():
        value = np.zeros(shape, np.float32)
        if name.endswith("norm.weight"):
            value[:] = 1
        elif name.endswith("base_kernel"):
            value[:, 0] = 1
        elif name.endswith("predecessor_codebook"):
            value = CODEBOOK_SCALE * generator.standard_normal(shape, np.float32)
        elif not name.endswith(("successor_codebook", "kernel_projection.weight")):
            value = generator.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
        found[name] = value
    return found
