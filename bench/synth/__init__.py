"""Synthetic `qwen4_exp` checkpoints: real names and record sizes, made-up values, real or sparse files.

Entry point: `build`; on the command line `python -m bench.synth PRESET OUT`.

Invariants:
1. The same arguments write the same bytes on every machine.
2. At 4 bits and group 64 the MLX and the Hugging Face output of one seed hold the same numbers, bit for bit:
   every matrix lies on a grid whose points are exact in bfloat16.
3. A sparse file has its true size, header and integer buffers; all else is a hole that reads as zero.

Source: qwen4exp.md section 3 (names, shapes, sizes); the grids, skewed routes and wide margins follow the
peer benchmark's generator.
"""

from bench.synth.build import build
from bench.synth.presets import PRESETS, Preset

__all__ = ["PRESETS", "Preset", "build"]
