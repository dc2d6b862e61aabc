"""What the checkpoint says about generating: default sampling and the ids that end an answer.

Entry point: `read_generation_defaults`. Owns `generation_config.json` and the end ids of `config.json`.

Source: qwen4exp.md 5.1 and 5.2. Order of a value: request, flag, this file, then 1.0 (or "off").
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from mlx_flashnext.errors import DocumentCorrupt
from mlx_flashnext.regular_file import document_failed, read_regular

_T = TypeVar("_T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults of one checkpoint; None where it says nothing.

    Attributes:
        eos_ids: ids that end an answer, in the file's order.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_ids: tuple[int, ...] = ()


class _File(msgspec.Struct):
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_id: int | list[int] | None = None


class _TextConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _Config(msgspec.Struct):
    eos_token_id: int | list[int] | None = None
    text_config: _TextConfig | None = None


def read_generation_defaults(directory: Path) -> GenerationDefaults:
    """Read the defaults of a checkpoint directory; an absent file says nothing.

    Raises:
        DocumentCorrupt: a file is not JSON, or a value has the wrong type.
    """
    file = _decode(directory / "generation_config.json", _File)
    config = _decode(directory / "config.json", _Config)
    text = config.text_config or _TextConfig()
    candidates = (file.eos_token_id, config.eos_token_id, text.eos_token_id)
    eos = next((value for value in candidates if value is not None), ())
    return GenerationDefaults(
        # A file that switches sampling off means greedy, whatever temperature stands beside it.
        temperature=0.0 if file.do_sample is False else file.temperature,
        top_k=file.top_k,
        top_p=file.top_p,
        min_p=file.min_p,
        repetition_penalty=file.repetition_penalty,
        eos_ids=(eos,) if isinstance(eos, int) else tuple(eos),
    )


def _decode(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(read_regular(path), type=kind)
    except FileNotFoundError:
        return kind()
    except OSError as error:
        raise document_failed(error, path) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DocumentCorrupt(
            f"{path.name} cannot be read: {error}", hint="download the file again", path=str(path)
        ) from error
