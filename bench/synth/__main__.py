"""Command line of the generator: `python -m bench.synth PRESET OUT [--sparse] [--set FIELD=VALUE ...]`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

from bench.synth.build import build
from bench.synth.presets import PRESETS, Preset

MODE_GROUPS = {"affine": (4, 64), "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


def preset_from(arguments: argparse.Namespace) -> Preset:
    """Return the named preset with the flags applied."""
    preset = PRESETS[arguments.preset]
    changes: dict[str, object] = {}
    if arguments.layout:
        changes["layout"] = arguments.layout
    if arguments.mode:
        changes["mode"] = arguments.mode
        changes["bits"], changes["group_size"] = MODE_GROUPS[arguments.mode]
    for name in ("bits", "group_size", "float_dtype", "mtp"):
        if getattr(arguments, name) is not None:
            changes[name] = getattr(arguments, name)
    if arguments.set:
        fields = dict(item.split("=", 1) for item in arguments.set)
        changes["overrides"] = {**preset.overrides, **{k: json.loads(v) for k, v in fields.items()}}
    return dataclasses.replace(preset, **changes)  # pyright: ignore[reportArgumentType]


def main() -> None:
    about = "\n".join(f"  {name:10s} {preset.about}" for name, preset in PRESETS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench.synth",
        description="Write a synthetic qwen4_exp checkpoint.\n\npresets:\n" + about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sparse", action="store_true", help="true sizes, holes instead of values")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layout", choices=("hf", "hf-fp8", "mlx"))
    parser.add_argument("--mode", choices=MODE_GROUPS)
    parser.add_argument("--bits", type=int, choices=(2, 3, 4, 5, 6, 8))
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128))
    parser.add_argument("--float-dtype", choices=("BF16", "F32"), help="scales, norms and unpacked matrices")
    parser.add_argument("--mtp", action=argparse.BooleanOptionalAction)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="FIELD=JSON", help="replace text config fields"
    )
    arguments = parser.parse_args()
    start = time.monotonic()

    def progress(name: str, length: int) -> None:
        print(f"{name}  {length:>15,d} B  {time.monotonic() - start:7.1f} s", flush=True)

    build(
        preset_from(arguments), arguments.out, sparse=arguments.sparse, seed=arguments.seed, progress=progress
    )


if __name__ == "__main__":
    main()
