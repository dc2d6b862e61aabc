"""Do two drives give the sum of what each gives, and what do first reads cost that have to be compared?

Random records of a checkpoint through the store's own readers from two copies of its files, each held to a
rate and a latency of its own (simulated drives: the files lie in the page cache). Alone, both while every
record is new to the mirror, both once they were compared, and both where digests do that (`is_proved`).

    python -m bench.studies.mirror_gain CHECKPOINT [--rates 0.4 0.2] [--readers 8]
"""

import argparse
import json
from pathlib import Path

from expert_store.mirrored import MirroredSource
from expert_store.source import ByteSource, FileSource
from expert_store.testing import ThrottledSource
from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.reports.disk import measure_disk
from mlx_flashnext.reports.page_cache import prepare

LATENCY_S = 100e-6


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rates", type=float, nargs=2, default=(0.4, 0.2), help="GB/s of the two drives")
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--records", type=int, default=192)
    given = parser.parse_args()
    checkpoint = open_checkpoint(given.checkpoint)
    files = checkpoint.table.files
    prepare([info.path for info in files], "warm")
    layouts = {layer: layout.record for layer, layout in checkpoint.experts.items()}
    numbers = {number: number for number in range(len(files))}

    def drive(which: int) -> ByteSource:
        rate = given.rates[which] * 1e9
        return ThrottledSource(FileSource(files), latency_s=LATENCY_S, bytes_per_s=rate)

    def rate_of(source: ByteSource) -> float:
        got = measure_disk(
            layouts, source, num_readers=given.readers, per_request=given.readers,
            max_records=given.records, max_seconds=60, is_compared=True,
        )  # fmt: skip
        return round((got.bytes_per_s or 0) / 1e9, 4)

    found: dict[str, object] = {"simulated": True, "rates_gb_s": list(given.rates), "readers": given.readers}
    for which, name in enumerate(("first alone", "mirror alone")):
        found[name] = rate_of(drive(which))
    both = MirroredSource(drive(0), drive(1), numbers)
    found["both, compared as they come"] = rate_of(both)
    for _ in range(4):  # records that fell to the first copy may fall to the mirror next time
        rate_of(both)
    before = both.read_bytes
    found["both, compared before"] = rate_of(both)
    assert not both.dropped, both.dropped
    first, mirror = (now - then for now, then in zip(both.read_bytes, before, strict=True))
    found["share of the mirror"] = round(mirror / (first + mirror), 3)
    found["both, with digests"] = rate_of(MirroredSource(drive(0), drive(1), numbers, is_proved=True))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
