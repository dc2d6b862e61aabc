"""What does it cost that FP8 and BF16 experts are decoded a few pairs at a time?

One layer's experts at the real width, ten of them for one row (a decoded token) and for six (a verified
block), in the forms that checkpoints have: bfloat16, FP8 with 128 x 128 blocks, affine 4 bits. Each against
float32, which the CPU backend multiplies with directly; A/B/B/A, processor time. On Metal, where activations
are bfloat16, BF16 is direct and only FP8 is decoded: what that moves is printed as arithmetic, not measured.

    python -m bench.studies.layout_cost
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

import mlx.core as mx

from mlx_flashnext.config import Fp8Blocks, QuantSpec
from mlx_flashnext.model.quant import ExpertBank, ExpertMatrix, expert_glu

HIDDEN, WIDTH, SLOTS, TOP_K = 2560, 640, 12, 10
BLOCKS, AFFINE = Fp8Blocks(128, 128), QuantSpec("affine", 4, 64)
STORED_BYTES = {"float32": 4.0, "bfloat16": 2.0, "fp8": 1 + 2 / 128 / 128, "affine4": 0.5 + 2 * 2 / 64}


def matrix(kind: str, rows: int, columns: int) -> ExpertMatrix:
    """Return one projection of all slots."""
    if kind == "fp8":
        codes = mx.random.randint(0, 120, (SLOTS, rows, columns)).astype(mx.uint8)
        scales = mx.random.normal((SLOTS, rows // 128, columns // 128)).astype(mx.bfloat16)
        return ExpertMatrix(codes, scales, spec=BLOCKS)
    dense = mx.random.normal((SLOTS, rows, columns)) / columns**0.5
    if kind == "affine4":
        return ExpertMatrix(*mx.quantize(dense, group_size=64, bits=4), spec=AFFINE)
    return ExpertMatrix(dense.astype(getattr(mx, kind)))


def bank(kind: str) -> ExpertBank:
    """Return a layer's slots."""
    made = ExpertBank(matrix(kind, WIDTH, HIDDEN), matrix(kind, WIDTH, HIDDEN), matrix(kind, HIDDEN, WIDTH))
    stored = [part for one in (made.gate, made.up, made.down) for part in (one.weight, one.scales)]
    mx.eval([part for part in stored if part is not None])
    return made


def seconds(x_TD: mx.array, slots_TK: mx.array, of: ExpertBank) -> Callable[[], float]:
    def run() -> float:
        began = time.process_time()
        mx.eval(expert_glu(x_TD, slots_TK, of))
        return time.process_time() - began

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 6])
    options = parser.parse_args()
    report: dict[str, object] = {}
    for rows in options.rows:
        x_TD = mx.random.normal((rows, HIDDEN))
        slots_TK = mx.random.randint(0, SLOTS, (rows, TOP_K)).astype(mx.uint32)
        bound = seconds(x_TD, slots_TK, bank("float32"))
        for kind in ("bfloat16", "fp8", "affine4"):
            other = seconds(x_TD, slots_TK, bank(kind))
            bound(), other()
            ratios: list[float] = []
            for _ in range(options.rounds):
                a, b, c, d = bound(), other(), other(), bound()
                ratios.append((b + c) / (a + d))
            name = f"{kind} over float32, {rows * TOP_K} pairs"
            report[name] = {
                "ratio": round(statistics.median(ratios), 2),
                "spread": [round(min(ratios), 2), round(max(ratios), 2)],
            }
            print(f"{name}: {json.dumps(report[name])}", flush=True)
    values = 3 * HIDDEN * WIDTH
    for kind, stored in STORED_BYTES.items():
        # Decoding reads the codes, writes bfloat16 and reads it again; the others are read once.
        moved = values * (stored + 4 if kind == "fp8" else stored)
        print(f"on a device that computes in bfloat16, an expert of {kind} moves {moved / 1e6:.2f} MB a row")
        report[f"{kind}, MB moved an expert and row"] = round(moved / 1e6, 2)
    print(
        json.dumps(
            {
                "study": "layout_cost",
                "machine": f"{platform.machine()} {os.cpu_count()} cpus load {os.getloadavg()[0]:.1f}",
                "measured": "processor time",
                "rounds": options.rounds,
                "result": report,
            }
        )
    )


if __name__ == "__main__":
    main()
