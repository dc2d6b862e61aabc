"""`flashnext doctor` on a tiny checkpoint: it measures the path of a run, and says what it could not."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.engine_factory import Services
from cli.tree import app
from expert_store.errors import SourceFailed
from expert_store.source import FileSource
from expert_store.testing import CountingSource, FaultySource, ThrottledSource
from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.reports import disk
from mlx_flashnext.reports.disk import DiskRate, measure_disk
from mlx_flashnext.reports.doctor import READERS, examine
from tests.tiny.checkpoints import build_mlx
from tests.tiny.machines import linux


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("doctor") / "model")


def flashnext(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words], obj=Services())


def test_the_document_has_machine_versions_backend_and_the_models_own_records(model):
    result = flashnext("doctor", model, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    record = open_checkpoint(model).experts[0].record
    assert document["record_bytes"] == record.record_bytes
    assert document["machine"]["backend"] in ("cpu", "metal")
    assert {"flashnext", "mlx"} <= document["versions"].keys()
    assert [line["rate"]["num_readers"] for line in document["disk"]] == [*READERS, max(READERS)]
    for line in document["disk"]:
        assert line["rate"]["num_bytes"] == line["rate"]["num_records"] * record.record_bytes > 0
        assert line["rate"]["bytes_per_s"] > 0


def test_people_see_a_table_and_what_was_not_measured(model):
    result = flashnext("doctor", "--model", model)
    assert result.exit_code == 0, result.output
    cold = [line for line in result.stdout.splitlines() if line.startswith("cold, ")]
    assert ("fastest when cold: --readers" in result.stdout) == bool(cold)
    assert "not measured: " in result.stdout


@pytest.mark.parametrize(
    ("share", "row", "advises"), [(0.0, "cold, 0%", True), (1.0, "dropped, 100%", False)]
)
def test_readers_are_advised_only_where_the_drive_answered(model, monkeypatch, share, row, advises):
    """A page that was dropped may have stayed in memory: its rate is not the drive's."""
    monkeypatch.setattr("mlx_flashnext.reports.doctor.cached_share", lambda *_: share)
    result = flashnext("doctor", "--model", model)
    assert row in result.stdout
    assert ("fastest when cold: --readers" in result.stdout) == advises
    assert ("the cold drive: pages stayed in memory" in result.stdout) != advises


def test_the_rate_is_that_of_the_drive_it_reads_from(model):
    """A drive of 4 MB/s is measured as one: the reads go through the store's readers, none is left out."""
    checkpoint = open_checkpoint(model)
    records = {layer: layout.record for layer, layout in checkpoint.experts.items()}
    counted: list[CountingSource] = []
    with FileSource(checkpoint.table.files) as plain:
        slow = ThrottledSource(plain, bytes_per_s=4e6)
        counted.append(CountingSource(slow))
        rate = measure_disk(records, counted[0], num_readers=2, per_request=4, max_records=40)
    assert rate.num_bytes == counted[0].num_bytes
    assert rate.num_records == 40
    assert rate.bytes_per_s is not None
    assert 1e6 < rate.bytes_per_s <= 4.1e6


def test_no_drive_is_infinitely_fast(monkeypatch: pytest.MonkeyPatch):
    """P21: no time, or time that ran backwards, is no bandwidth."""
    for wall_ns in (0, -5):
        assert DiskRate(10, 1, 1, 10, wall_ns, 0, 0, 0).bytes_per_s is None
    assert DiskRate(10, 1, 1, 10, 1000, 0, 0, 0).bytes_per_s == pytest.approx(1e7)
    assert disk.REQUESTS_AHEAD > 0


def test_a_drive_that_fails_is_an_error_and_no_figure(model):
    def broken(_number: int, _file: int, _offset: int, _wanted: int) -> OSError:
        return OSError(5, "Input/output error")

    with pytest.raises(SourceFailed, match="Input/output error"):
        examine(open_checkpoint(model), linux(), wrap_source=lambda source: FaultySource(source, broken))
