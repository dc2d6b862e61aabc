"""From flags and the model's own defaults to sampling parameters.

Order: flag, then generation_config.json, then 1.0 or off.
"""

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cli.errors import INCOMPATIBLE, CommandError, UsageProblem
from cli.options import SamplingOptions
from cli.prompts import decode_argument

if TYPE_CHECKING:
    from mlx_flashnext.engine.sampler import SamplingParams
    from mlx_flashnext.tokenizer import Tokenizer

_T = TypeVar("_T")


def sampling_params(options: SamplingOptions, directory: Path) -> "SamplingParams":
    """Return how tokens are chosen, with a seed in any case, so that every answer can be repeated.

    Raises:
        InvalidRequest: a value is out of its range.
        CommandError: a default of the model is.
    """
    from mlx_flashnext.engine.errors import InvalidRequest
    from mlx_flashnext.engine.sampler import SamplingParams
    from mlx_flashnext.text.generation_config import read_generation_defaults

    defaults = read_generation_defaults(directory)
    try:
        own = SamplingParams(
            temperature=_first(defaults.temperature, 1.0),
            top_k=_first(defaults.top_k, 0),
            top_p=_first(defaults.top_p, 1.0),
            min_p=_first(defaults.min_p, 0.0),
            repetition_penalty=_first(defaults.repetition_penalty, 1.0),
        )
    except InvalidRequest as error:
        raise CommandError(
            f"generation_config.json: {error.message}", hint="download the file again", code=INCOMPATIBLE
        ) from error
    return SamplingParams(
        temperature=_first(options.temp, own.temperature),
        top_k=_first(options.top_k, own.top_k),
        top_p=_first(options.top_p, own.top_p),
        min_p=_first(options.min_p, own.min_p),
        repetition_penalty=_first(options.repetition_penalty, own.repetition_penalty),
        presence_penalty=_first(options.presence_penalty, own.presence_penalty),
        frequency_penalty=_first(options.frequency_penalty, own.frequency_penalty),
        seed=secrets.randbits(32) if options.seed is None else options.seed,
    )


def stop_ids(options: SamplingOptions, tokenizer: "Tokenizer") -> tuple[int, ...]:
    """Return the ids that end an answer.

    Raises:
        UsageProblem: `--extra-eos-token` names no token of this model, or is not UTF-8.
    """
    found = list(tokenizer.eos_ids)
    for token in options.extra_eos_token or ():
        token_id = tokenizer.id_of(decode_argument(token, "--extra-eos-token"))
        if token_id is None:
            raise UsageProblem(
                f"This model has no such token: {token!r}", hint="--extra-eos-token '<|im_end|>'"
            )
        found.append(token_id)
    return tuple(dict.fromkeys(found))


def sampling_report(params: "SamplingParams", options: SamplingOptions) -> dict[str, Any]:
    """Return what is in force, for programs."""
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "seed": params.seed,
        "max_tokens": options.max_tokens,
        "extra_eos_tokens": list(options.extra_eos_token or ()),
    }


def _first(value: _T | None, otherwise: _T) -> _T:
    return otherwise if value is None else value
