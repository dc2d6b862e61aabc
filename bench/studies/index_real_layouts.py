"""How long does it take to open a full-size checkpoint, and how much memory?

    python -m bench.studies.index_real_layouts [--runs 5]

Writes sparse files of the real sizes (BF16, FP8 with 150,528 expert tensors, 4-bit MLX) to a temporary
directory and opens each in fresh processes. Bound asked for: 2 s and 300 MB of resident memory. Processor
time is given too: it is what counts on a machine that others use at the same time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.synth import PRESETS, build

LAYOUTS = ("real-bf16", "real-fp8", "real-mlx4")

# Runs in a process of its own. VmHWM, not ru_maxrss: the latter includes the parent's memory on Linux.
OPEN = """
import json, pathlib, sys, time
start = time.perf_counter()
used = time.process_time()
from mlx_flashnext.checkpoint import open_checkpoint
imported = time.perf_counter()
checkpoint = open_checkpoint(pathlib.Path(sys.argv[1]))
opened = time.perf_counter()
used = time.process_time() - used
status = pathlib.Path("/proc/self/status")
if status.exists():
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    peak = int(lines["VmHWM"].split()[0]) * 1024
else:
    import resource
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({
    "import_s": imported - start,
    "open_s": opened - imported,
    "processor_s": used,
    "peak_rss_bytes": peak,
    "layout": checkpoint.layout,
    "num_files": len(checkpoint.table.files),
    "categories": {line.category: [len(line.names), line.num_bytes] for line in checkpoint.account()},
    "loaded": sorted(m for m in ("mlx", "mlx_lm", "numpy", "transformers") if m in sys.modules),
}))
"""


def open_in_process(directory: Path) -> dict[str, object]:
    """Open a checkpoint in a fresh Python process and return what it measured."""
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        [sys.executable, "-c", OPEN, str(directory)], capture_output=True, text=True, check=True, cwd=root
    )
    return json.loads(run.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        print("layout      tensors  files  open, best s  worst s  processor, best s  peak RSS MB")
        for name in LAYOUTS:
            directory = build(PRESETS[name], Path(folder) / name, sparse=True)
            results = [open_in_process(directory) for _ in range(runs)]
            seconds = [float(str(result["open_s"])) for result in results]
            busy = min(float(str(result["processor_s"])) for result in results)
            peak = max(int(str(result["peak_rss_bytes"])) for result in results)
            categories = results[0]["categories"]
            assert isinstance(categories, dict)
            num_tensors = sum(count for count, _ in categories.values())
            print(
                f"{name:10s}  {num_tensors:7d}  {results[0]['num_files']!s:>5s}  {min(seconds):12.2f}  "
                f"{max(seconds):7.2f}  {busy:17.2f}  {peak / 1e6:11.0f}"
            )


if __name__ == "__main__":
    main()
