"""Does every field of the golden traces matter? Every place of every line is changed, digests made anew.

    python -m bench.studies.mutate_traces

The checks are those of tests/unit/drafter/test_record.py, which tries a few changes of each field.
"""

import argparse

from tests.unit.drafter.test_record import NAMES, check_every_field, check_meaning


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    everything, total = 1 << 30, 0
    for name in NAMES:
        counts = check_every_field(name, everything), check_meaning(name, everything)
        total += sum(counts)
        print(f"{name}: {counts[0]} changes, {counts[1]} with sums that agree", flush=True)
    print(f"{total} changed traces: all refused for what they mean, or of another outcome")


if __name__ == "__main__":
    main()
