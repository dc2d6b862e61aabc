"""Full-size checkpoints, as sparse files of the real names and sizes, open in little memory."""

import pytest

from bench.studies.index_real_layouts import open_in_process
from bench.synth import PRESETS, build

# Counts and bytes of qwen4exp.md 3.1 to 3.3 and 3.7; the expert lines are 48 (or 1) x 512 records.
TOTALS = {
    "real-bf16": ("hf", 1658, 359_999_963_128, 131),
    "real-fp8": ("hf-fp8", 152_089, 185_502_232_570, 131),
    "real-mlx4": ("mlx", 3767, 111_518_894_072, None),
}
EXPERTS = {
    "real-bf16": (96, 241_591_910_400),
    "real-fp8": (147_456, 48 * 512 * 4_915_800),
    "real-mlx4": (432, 48 * 512 * 3_072_000),
}
NGRAM = {
    "real-bf16": (128, 320_001_536 * 320),
    "real-fp8": (129, 320_001_536 * 160 + 2),
    "real-mlx4": (384, 320_001_536 * 100),
}


@pytest.mark.parametrize("name", list(TOTALS))
def test_a_full_size_checkpoint_opens_within_300_mb_and_accounts_for_every_tensor(tmp_path, name):
    result = open_in_process(build(PRESETS[name], tmp_path / name, sparse=True))
    layout, num_tensors, num_bytes, num_files = TOTALS[name]
    categories = result["categories"]
    assert result["layout"] == layout
    assert sum(count for count, _ in categories.values()) == num_tensors
    assert sum(length for _, length in categories.values()) == num_bytes
    assert num_files in (None, result["num_files"])
    assert tuple(categories["experts"]) == EXPERTS[name]
    assert tuple(categories["ngram"]) == NGRAM[name]
    assert categories["vision"] == [333, 897_862_112]
    assert result["peak_rss_bytes"] < 300_000_000


def test_opening_a_checkpoint_needs_no_numbers_library(tmp_path):
    assert open_in_process(build(PRESETS["small"], tmp_path, sparse=True))["loaded"] == []
