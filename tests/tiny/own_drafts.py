"""Draft directories that fit a tiny checkpoint, with random weights: real but for training.

Entry point: `write_draft`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import mlx.core as mx
import msgspec
import numpy as np

from drafter import contract
from drafter.contract import contract_of
from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.engine.draft_files import open_draft
from mlx_flashnext.engine.draft_target import target_facts
from mlx_flashnext.model.flashnext import Contraction
from mlx_flashnext.tokenizer import Tokenizer
from tests.tiny.drafts import document, draft_config, random_parameters
from tests.tiny.safetensors_io import Stored, write_safetensors


def write_draft(
    directory: Path,
    target: Path,
    *,
    contraction: str = "next_attn_mix",
    seed: int = 0,
    changes: Mapping[str, object] | None = None,
) -> Path:
    """Write config, weights and contract of a draft for the checkpoint in `target`; return `directory`."""
    checkpoint, tokenizer = open_checkpoint(target), Tokenizer.open(target)
    fitting = {
        "hidden_size": checkpoint.config.hidden_size,
        "vocab_size": checkpoint.config.vocab_size,
        "num_target_layers": checkpoint.config.num_hidden_layers,
        "dflash_config.target_layer_ids": [0, 1, 2],
        **(changes or {}),
    }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(document(fitting)))
    parameters = random_parameters(draft_config(fitting), seed)
    write_safetensors(directory / "model.safetensors", {n: _stored(v) for n, v in parameters.items()})
    facts = target_facts(
        checkpoint,
        tokenizer,
        None,
        name="tiny",
        contractions=get_args(Contraction),
        runtime_version="0",
        itemsize=4,
        context_tokens=512,
        memory_left=None,
    )
    with open_draft(directory) as files:
        own = contract_of(draft_config(fitting), files.listing, facts, contraction=contraction, licence="mit")
    (directory / contract.FILE).write_bytes(msgspec.json.encode(own))
    return directory


def _stored(value: mx.array) -> Stored:
    array = np.array(value).astype("<f4")
    return Stored("F32", array.shape, array.tobytes())
