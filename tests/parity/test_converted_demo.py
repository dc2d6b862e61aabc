"""A trained model through a conversion: what it says, and what its MTP module still guesses."""

import hashlib
import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_flashnext.conversion.recipe import Recipe, parse_spec
from mlx_flashnext.conversion.writing import convert_checkpoint
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Finished, Token
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.sampler import SamplingParams
from mlx_flashnext.reports.compare import compare_builds
from mlx_flashnext.reports.prompt_sets import chat_prompts, demo_tasks
from tests.tiny.plain_demo import build_plain_demo

TOKENS, MTP_TOKENS, SLOTS = 12, 24, 24
REQUEST = PlanRequest(context_tokens=512, slots_per_layer=SLOTS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_plain_demo(tmp_path_factory.mktemp("demo") / "plain")


@pytest.fixture(scope="module")
def converted(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = Recipe(experts=parse_spec("3"), mtp_experts=parse_spec("mxfp8"), mtp_trunk=parse_spec("8"))
    return convert_checkpoint(plain, tmp_path_factory.mktemp("demo") / "out", recipe).directory


def answer_with_mtp(directory: Path) -> tuple[list[int], int, int]:
    """Return a greedy answer's tokens, and how many tokens MTP proposed and the target accepted."""
    request = PlanRequest(
        context_tokens=512, slots_per_layer=SLOTS, draft="mtp", num_draft_tokens=2, num_snapshots=0
    )
    with Engine.open(directory, request) as engine:
        (prompt,) = chat_prompts(directory, engine.tokenizer, demo_tasks()[:1])
        session = engine.session(is_guarded=False)
        events = list(
            session.generate(prompt, SamplingParams(temperature=0.0), max_tokens=MTP_TOKENS, stop_ids=())
        )
    assert isinstance(events[-1], Finished)
    draft = events[-1].statistics.draft
    assert draft.used == "mtp"
    return [e.token_id for e in events if isinstance(e, Token)], draft.num_proposed, draft.num_accepted


def damage_mtp(directory: Path) -> Path:
    """Mix up the columns of the MTP module's stream projection, as a wrong transposition would."""
    for path in directory.glob("*.safetensors"):
        tensors = mx.load(str(path))
        assert isinstance(tensors, dict)
        if "mtp.fc_hidden.weight" in tensors:
            for part in ("weight", "scales", "biases"):
                tensors[f"mtp.fc_hidden.{part}"] = tensors[f"mtp.fc_hidden.{part}"][::-1]
            mx.eval(tensors)
            mx.save_safetensors(str(path), tensors, {"format": "mlx"})
    return directory


def test_a_converted_mtp_module_is_accepted_as_before_and_a_damaged_one_is_not(
    plain: Path, converted: Path, tmp_path: Path
) -> None:
    """P42: zero acceptance after a conversion, and nobody noticed."""
    _, proposed, accepted = answer_with_mtp(plain)
    assert accepted > 0.4 * proposed
    tokens, proposed, kept = answer_with_mtp(converted)
    share = kept / proposed
    assert share > 0.4
    recipe = Recipe(experts=parse_spec("3"), mtp_experts=parse_spec("mxfp8"), mtp_trunk=parse_spec("8"))
    broken = damage_mtp(convert_checkpoint(plain, tmp_path / "broken", recipe).directory)
    again, proposed, kept = answer_with_mtp(broken)
    assert again == tokens  # the target alone decides
    assert kept / proposed < 0.5 * share


def digest(tensors: dict[str, mx.array]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + bytes(memoryview(tensors[name]).cast("B")))  # type: ignore[arg-type]
    return found.hexdigest()


def test_the_digest_of_a_converted_mtp_module_does_not_depend_on_how_it_was_read(
    plain: Path, converted: Path
) -> None:
    """P42: the same block, quantised here from whole arrays, has the same bytes."""
    source, section = (
        mx.load(str(plain / "model.safetensors")),
        json.loads((converted / "config.json").read_bytes())["quantization"],
    )
    written: dict[str, mx.array] = {}
    for path in converted.glob("*.safetensors"):
        written |= mx.load(str(path))  # type: ignore[arg-type]
    mine = {name: value for name, value in written.items() if name.startswith("mtp.")}
    expected: dict[str, mx.array] = {}
    for name, value in source.items():  # type: ignore[union-attr]
        if not name.startswith("language_model.mtp."):
            continue
        stem = name.removeprefix("language_model.").removesuffix(".weight")
        spec = section.get(stem, section if f"{stem}.scales" in mine else False)
        if not spec or f"{stem}.scales" not in mine:
            expected[name.removeprefix("language_model.")] = value
            continue
        how = {key: spec[key] for key in ("group_size", "bits", "mode")}
        expected |= {
            f"{stem}.{part}": array
            for part, array in zip(("weight", "scales", "biases"), mx.quantize(value, **how), strict=False)
        }
    mx.eval(expected)
    assert len(expected) == len(mine) > 40
    assert digest(mine) == digest(expected)


def test_a_trained_model_still_says_what_it_said(plain: Path, converted: Path) -> None:
    found = compare_builds(plain, converted, REQUEST, num_prompts=1, num_tokens=TOKENS)
    assert found.agreement >= 0.9
    assert 0 < found.divergence < 0.02
    assert all(0 < error < 0.3 for error in found.layers)
