"""The small files of a checkpoint: read whole, or refused; a pipe or a device never holds the program up."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_flashnext.config import read_config
from mlx_flashnext.errors import ModelError
from mlx_flashnext.regular_file import read_regular
from mlx_flashnext.text.generation_config import read_generation_defaults
from mlx_flashnext.text.template import ChatTemplate


def test_a_file_is_read_whole_through_links(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b"content"


def test_a_file_larger_than_allowed_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    with pytest.raises(OSError, match="Larger than 6 bytes: 7"):
        read_regular(tmp_path / "file", 6)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


READERS: dict[str, Callable[[Path], object]] = {
    "config.json": read_config,
    "generation_config.json": read_generation_defaults,
    "tokenizer_config.json": ChatTemplate.open,
    "chat_template.jinja": ChatTemplate.open,
}


@pytest.mark.parametrize("make", [pipe, device, folder])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_refused_by_name(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    make(tmp_path / name)
    with pytest.raises(ModelError, match=f"(?i){name}.*(not a regular file|is a directory)") as caught:
        READERS[name](tmp_path)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_json_that_nests_without_end_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"x": ' + "[" * 100_000)
    with pytest.raises(ModelError, match=name):
        READERS[name](tmp_path)


def test_a_directory_is_named(tmp_path):
    """The stream that would be made of it is called 3."""
    with pytest.raises(IsADirectoryError) as refused:
        read_regular(tmp_path)
    assert refused.value.filename == str(tmp_path)
    number = os.open(tmp_path, os.O_RDONLY)
    os.close(number)
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)
    assert os.open(tmp_path, os.O_RDONLY) == number, "nothing stays open"
    os.close(number)
