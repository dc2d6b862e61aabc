"""Does a pack, or a conversion, that is killed at random moments always go on to the identical one?

Starts `flashnext pack` (or `convert`) in a process, kills it with SIGKILL after a random time, starts it
again, and so on until it gets through; compares the result byte for byte with one made in one go.

    python -m bench.studies.kill_pack --kills 200 [--work convert]
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.tiny.checkpoints import build_hf
from tests.tiny.packs import contents


def start(work: str, source: Path, target: Path) -> subprocess.Popen[bytes]:
    """Start a command in a process of its own."""
    program = "from cli.app import main; main()"
    command = [sys.executable, "-c", program, work, str(source), str(target), "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", choices=("pack", "convert"), default="pack")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    kills = packs = in_time = 0
    with tempfile.TemporaryDirectory() as folder:
        source = build_hf(Path(folder) / "model")
        whole, target = Path(folder) / "whole", Path(folder) / "pack"
        began = time.monotonic()
        _, errors = start(options.work, source, whole).communicate()
        took = time.monotonic() - began
        assert whole.exists(), errors
        expected = contents(whole)
        while kills < options.kills:
            process = start(options.work, source, target)
            # The program starts for most of the time: aim at what comes after.
            try:
                _, errors = process.communicate(timeout=draw.uniform(0.3, 1.1) * took)
                assert process.returncode == 0 or b"exists already" in errors, errors
            except subprocess.TimeoutExpired:
                in_time += (Path(folder) / "pack.journal").exists()
                process.send_signal(signal.SIGKILL)
                process.communicate()
                kills += 1
            if target.exists():
                assert contents(target) == expected
                shutil.rmtree(target)
                packs += 1
        process = start(options.work, source, target)
        process.communicate()
        assert contents(target) == expected
    print(f"{kills} kills, {in_time} while files were being written, {packs + 1} wholes, all identical")
    found = {"kills": kills, "while_writing": in_time, "wholes": packs + 1}
    print(json.dumps({"study": "kill_pack", "work": options.work, **found}))


if __name__ == "__main__":
    main()
