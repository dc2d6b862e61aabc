"""Pack documents into rows of one length: every row starts with a document, the last one is cut."""

from __future__ import annotations

import pathlib

import numpy as np
import torch
from torch import Tensor

from .prepare import ANSWER_WEIGHT

Data = dict[str, np.ndarray]


def load(path: pathlib.Path) -> Data:
    """Return the arrays of one data file."""
    with np.load(path) as f:
        return {k: f[k] for k in f.files}


class Rows:
    """Rows of `length` tokens over a data file, in a seeded order that wraps around."""

    def __init__(self, data: Data, length: int, seed: int) -> None:
        self.tokens, self.weights, self.length = data["tokens"], data["weights"], length
        starts = data["starts"]
        firsts, at = [], 0
        while starts[at] + length <= starts[-1]:
            firsts.append(starts[at])
            at = int(np.searchsorted(starts, starts[at] + length))
        self.firsts = np.random.default_rng(seed).permutation(np.array(firsts))

    def __len__(self) -> int:
        return len(self.firsts)

    def batch(self, index: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return batch `index`: tokens `[rows,length]` int64 and weights `[rows,length]` float32."""
        picks = self.firsts[np.arange(index * rows, (index + 1) * rows) % len(self.firsts)]
        where = picks[:, None] + np.arange(self.length)
        tokens = torch.from_numpy(self.tokens[where].astype(np.int64))
        return tokens, torch.from_numpy(self.weights[where].astype(np.float32) / ANSWER_WEIGHT)
