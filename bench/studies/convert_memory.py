"""How much memory does converting a full-size checkpoint take, and does a conversion that is killed go on?

    python -m bench.studies.convert_memory [--minutes 5] [--kills 3] [--every 1] SOURCE WORK [-- FLAGS]

Converts SOURCE to WORK/converted in a process that is killed with SIGKILL after --minutes and begun again,
--kills times; the last run may end by itself. Prints the peak resident size (VmHWM) of every run and how far
it came. SOURCE may be a sparse checkpoint of the real sizes (`python -m bench.synth real-bf16 OUT --sparse`):
its values are noughts, so the output is written with holes where every byte is nought, and the space check,
which counts every byte, is off. Neither changes what is held in memory. Bound asked for: 2 GB. Linux only.

Thirty-five minutes of one core are a lot where others work too. With --every N only each N-th shard is
converted; the others are made at once as they would come out where everything stays as it is (`-- --experts
none --trunk none --table none --mtp none`) and every value is nought: their header, and a hole. What the
conversion plans, opens and checks is the whole all the same.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

BOUND_BYTES = 2 * 10**9

CHILD = """
import os, sys
from pathlib import Path
from expert_store import staging
from mlx_flashnext.conversion import writing
from cli.app import main

honest = staging.write_all
def with_holes(stream, data):
    if len(data) < 4096 or any(memoryview(data).cast("B")[:64]) or bytes(data).strip(b"\\0"):
        return honest(stream, data)
    end = stream.seek(len(data), os.SEEK_CUR)
    if os.fstat(stream.fileno()).st_size < end:
        os.ftruncate(stream.fileno(), end)
writing.write_all = with_holes
staging.StagedDirectory.check_space = lambda self, sizes: None
every = int(os.environ["EVERY"])
written = staging.StagedDirectory.write
def write(self, name, size, fill):
    if not name.startswith("model-") or int(name.split("-")[1]) % every == 0:
        return written(self, name, size, fill)
    shard = fill.args[0]
    if any(output.dtype == "I64" for work in shard.works for output in work.outputs):
        return written(self, name, size, fill)  # its numbers are no noughts in a sparse source either
    def hole(stream):
        honest(stream, shard.header)
        stream.truncate(size)
        return ()
    return written(self, name, size, hole)
if every > 1:
    staging.StagedDirectory.write = write
main(["convert", *sys.argv[1:], "--no-agreement", "--no-golden", "--json"])
"""


def peak_bytes(process: subprocess.Popen[str]) -> int:
    """Return the peak resident size of a process so far, 0 once it is gone."""
    try:
        text = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM")), 0)


def run(source: Path, target: Path, flags: list[str], seconds: float, every: int) -> dict[str, object]:
    """Run one conversion for at most so long; kill it if it takes longer."""
    command = [sys.executable, "-c", CHILD, str(source), str(target), *flags]
    began = time.monotonic()
    environment = {**os.environ, "EVERY": str(every)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    peak = 0
    while process.poll() is None:
        peak = max(peak, peak_bytes(process))
        if time.monotonic() - began > seconds:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.2)
    output, _ = process.communicate()
    journal = target.with_name(target.name + ".journal")
    finished = len(journal.read_bytes().splitlines()) - 1 if journal.exists() else None
    return {
        "ended": process.returncode == 0,
        "seconds": round(time.monotonic() - began, 1),
        "peak_bytes": peak,
        "shards_finished": finished,
        "result": json.loads(output) if process.returncode == 0 else None,
    }


def main() -> None:
    """Run, kill, and run again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--every", type=int, default=1, help="convert each N-th shard; see above")
    parser.add_argument("flags", nargs="*", help="flags of flashnext convert")
    options = parser.parse_args()
    target = options.work / "converted"
    stored = sum(path.stat().st_size for path in options.source.glob("*.safetensors"))
    runs: list[dict[str, object]] = []
    for _ in range(options.kills + 1):
        found = run(options.source, target, options.flags, 60 * options.minutes, options.every)
        runs.append(found)
        print(json.dumps({name: value for name, value in found.items() if name != "result"}), flush=True)
        if found["ended"]:
            break
    peak = max(int(str(one["peak_bytes"])) for one in runs)
    print(f"source {stored / 2**30:.0f} GiB, peak {peak / 1e6:.0f} MB: bound {BOUND_BYTES / 1e6:.0f} MB")
    result = runs[-1].pop("result")
    if target.exists():
        held = sum(path.stat().st_blocks * 512 for path in target.iterdir())
        print(f"whole, after {len(runs)} runs; {held / 2**30:.1f} GiB on the disk without the holes")
        shutil.rmtree(target)
    print(
        json.dumps(
            {
                "study": "convert_memory",
                "source_bytes": stored,
                "every": options.every,
                "peak_bytes": peak,
                "runs": runs,
                "is_whole": runs[-1]["ended"],
                "bytes": result["bytes"] if isinstance(result, dict) else None,
            }
        )
    )


if __name__ == "__main__":
    main()
