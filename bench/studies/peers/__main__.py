"""Side by side on the same work: this project, mlx-vlm's `moe_offload`, transformers, llama.cpp.

    python -m bench.studies.peers run WORK RESULTS --legs half --seconds 280 --mlx-vlm PYTHON
    python -m bench.studies.peers table RESULTS

WORK holds the forms of one checkpoint, written beforehand: `python -m bench.studies.peers.checkpoint large
WORK/large-mlx`, then `flashnext pack WORK/large-mlx WORK/large-pack --no-golden` and, in the peer's
environment, `python -m mlx_vlm moe_offload --build WORK/large-mlx --out WORK/large-off`. For the leg
`reference` likewise with `small`, and with `--layout hf` and `gguf_form.py`.
The leg `mtp` (`--size small`) wants those of `small`, and `checkpoint small WORK/small-mtp --mtp with` and
`checkpoint small WORK/small-drafter --mtp alone`: the same tensors with an MTP module, and that module by
itself, which is how mlx-vlm takes it.
`run` does what RESULTS lacks, as far as the seconds go, and may be called again; it needs root, for control
groups and dropping the page cache. The last line of stdout is one JSON document.
"""

import argparse
import json
import sys
from pathlib import Path

from bench.studies.peers.legs import LEGS
from bench.studies.peers.run import read_runs, run_rounds
from bench.studies.peers.table import judge, table


def main() -> None:
    """Run, or show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("work", type=Path)
    run.add_argument("results", type=Path)
    run.add_argument("--size", default="large")
    run.add_argument("--legs", nargs="+", choices=LEGS, default=["resident", "half", "two fifths"])
    run.add_argument("--rounds", type=int, default=5)
    run.add_argument("--seconds", type=float, default=280.0)
    run.add_argument(
        "--peer-overhead", type=float, default=0.8e9, help="bytes a peer takes besides its cache"
    )
    run.add_argument("--only", help="the one contender to run")
    run.add_argument("--mlx-vlm", default=sys.executable, help="the interpreter that has it")
    run.add_argument("--transformers", default=sys.executable)
    run.add_argument("--llama", default=sys.executable)
    show = commands.add_parser("table")
    show.add_argument("results", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        pythons = {
            "flashnext": sys.executable, "mlx-vlm": options.mlx_vlm, "transformers": options.transformers,
            "llama.cpp": options.llama,
        }  # fmt: skip
        left = run_rounds(
            options.work, options.size, options.legs, options.rounds, options.results, pythons,
            options.seconds, int(options.peer_overhead), options.only,
        )  # fmt: skip
        print(json.dumps({"study": "peers", "missing": left}))
        return
    runs = read_runs(options.results)
    print(table(runs))
    print(json.dumps({"study": "peers", **judge(runs)}))


if __name__ == "__main__":
    main()
