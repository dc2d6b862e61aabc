"""Do readers survive hostile files? 100,000 cases of every format.

    python -m bench.studies.fuzz_formats [--cases N] [--seed S] [--only NAME]

Formats are those of tests/fuzzed_formats.py, cases those of tests/fuzzing.py; a failure names format, seed
and number, which make it again.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from tests.fuzzed_formats import formats
from tests.fuzzing import run_cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    result = {}
    with tempfile.TemporaryDirectory() as place:
        for form in formats(Path(place)):
            if asked.only in form.name:
                began = time.perf_counter()
                counts = run_cases(form, asked.cases, asked.seed)
                result[form.name] = counts
                print(f"{form.name}: {counts} in {time.perf_counter() - began:.0f} s", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
