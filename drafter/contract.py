"""The contract beside a draft: everything that it takes for granted, so that what does not fit has a name.

Entry points: `DraftContract`, `read_contract`, `compare_contract`. Every field is held against the draft's
own config, against the target, or against what this program does; a field that nothing is compared with has
no place in it. The author of a draft writes it (training does), or there is none.

Source: dflash2.md 7.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec

from drafter.config import DraftConfig
from drafter.documents import DocumentRefused, check_version, parse_object
from drafter.facts import DraftListing, TargetFacts
from drafter.reasons import Consequence, Report

FORMAT = "flashnext-draft-contract"
VERSION = 1
FILE = "flashnext-contract.json"

# What this program does; a draft that was made for something else does not fit it.
STAGE = "layer_output"
POSITIONS = "token_index"
OWNER = "drafter"
ROWS = "context_only"
ROLLBACK = "rejected_rows_never_observed"

_Few = msgspec.Meta(max_length=256)


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class DraftIdentity(_Part, frozen=True):
    """Which files: architecture, digest (docs/FORMATS.md), licence as its author states it."""

    architecture: str
    digest: str
    licence: str


class TargetIdentity(_Part, frozen=True):
    """Which target it was trained for, down to the build."""

    name: str
    revision: str
    digest: str
    quantisation: str
    num_layers: int
    hidden_size: int
    num_streams: int


class TokenizerIdentity(_Part, frozen=True):
    """Which ids mean what."""

    revision: str
    digest: str
    vocab_size: int
    num_ids: int
    stop_ids: Annotated[list[int], _Few]
    pad_id: int | None
    mask_token_id: int
    mask_row_digest: str


class FeatureContract(_Part, frozen=True):
    """What it reads of the target: taps are 0-based layers; `stage` says that outputs are complete."""

    taps: Annotated[list[int], _Few]
    contraction: str
    stage: str


class Dimensions(_Part, frozen=True):
    """Sizes of the network; 0 for parts that v1 lacks."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    conv_kernel: int
    conv_group: int
    rank: int


class AttentionContract(_Part, frozen=True):
    """What a block row sees, and how positions are counted."""

    layer_types: Annotated[list[str], _Few]
    is_causal: Annotated[list[bool], _Few]
    window: int | None
    rope_theta: float
    positions: str


class ProposalContract(_Part, frozen=True):
    """What comes out: block, candidates, the law of a token, and the rules that may judge it."""

    block_size: int
    max_proposals: int
    candidates: int
    probabilities: str
    rules: Annotated[list[str], _Few]


class CacheContract(_Part, frozen=True):
    """Who keeps what between cycles, and what happens when rows are rejected."""

    owner: str
    rows: str
    rollback: str


class DraftContract(_Part, frozen=True):
    """The document. See docs/FORMATS.md."""

    format: str
    version: int
    draft: DraftIdentity
    target: TargetIdentity
    tokenizer: TokenizerIdentity
    features: FeatureContract
    dimensions: Dimensions
    attention: AttentionContract
    proposal: ProposalContract
    cache: CacheContract


def read_contract(data: bytes) -> DraftContract:
    """Return the contract of a file.

    Raises:
        DocumentRefused: it is no such document, of another version, or says more than is understood.
    """
    try:
        contract = msgspec.convert(parse_object(data, FILE), DraftContract, strict=True)
    except msgspec.ValidationError as error:
        raise DocumentRefused(f"{FILE} is no draft contract: {error}") from None
    check_version(FILE, (contract.format, contract.version), (FORMAT, VERSION))
    return contract


def laws(config: DraftConfig) -> tuple[str, list[str]]:
    """Return how a draft's probabilities are given, and the rules that may judge its proposals."""
    if config.has_selector:
        return "selector_rows", ["coupled", "delta", "sampled"]
    return "point", ["coupled", "delta"]


class _Row(NamedTuple):
    """One comparison: code, field, what the contract says, what is so, and what follows if they differ."""

    code: str
    field: str
    said: object
    found: object
    consequence: Consequence = "refuse"


def compare_contract(
    contract: DraftContract, config: DraftConfig, listing: DraftListing, target: TargetFacts, report: Report
) -> None:
    """Note every field of a contract that is not so."""
    for row in _rows(contract, config, listing, target):
        if row.said != row.found:
            report.add(
                row.code,
                f"contract.{row.field}",
                row.said,
                row.found,
                f"contract says {row.field} = {row.said!r}, found {row.found!r}",
                consequence=row.consequence,
                hint="the contract belongs to another draft, target or program",
            )


def _rows(
    c: DraftContract, config: DraftConfig, listing: DraftListing, target: TargetFacts
) -> Iterator[_Row]:
    yield _Row("G10", "draft.digest", c.draft.digest, listing.digest)
    yield _Row("G01", "draft.architecture", c.draft.architecture, config.architecture)
    licence = listing.licence or c.draft.licence
    yield _Row("G23", "draft.licence", c.draft.licence, licence, "warn")

    if c.target.digest != target.digest:  # what lies in another folder, or in a pack, is the same build
        yield _Row("G19", "target.name", c.target.name, target.name, "warn")
        yield _Row("G19", "target.revision", c.target.revision, target.revision, "warn")
        yield _Row("G19", "target.digest", c.target.digest, target.digest, "warn")
    yield _Row("G19", "target.quantisation", c.target.quantisation, target.quantisation, "warn")
    yield _Row("G03", "target.num_layers", c.target.num_layers, target.num_layers)
    yield _Row("G02", "target.hidden_size", c.target.hidden_size, target.hidden_size)
    yield _Row("G14", "target.num_streams", c.target.num_streams, target.num_streams)

    ids = c.tokenizer
    yield _Row("G06", "tokenizer.revision", ids.revision, target.tokenizer_revision, "warn")
    yield _Row("G06", "tokenizer.digest", ids.digest, target.tokenizer_digest)
    yield _Row("G05", "tokenizer.vocab_size", ids.vocab_size, target.vocab_size)
    yield _Row("G05", "tokenizer.num_ids", ids.num_ids, target.num_ids)
    yield _Row("G09", "tokenizer.stop_ids", sorted(ids.stop_ids), sorted(target.stop_ids), "warn")
    yield _Row("G07", "tokenizer.pad_id", ids.pad_id, target.pad_id, "warn")
    yield _Row("G07", "tokenizer.mask_token_id", ids.mask_token_id, config.mask_token_id)
    row_digest = target.row_digest(config.mask_token_id) if target.row_digest else ids.mask_row_digest
    yield _Row("G08", "tokenizer.mask_row_digest", ids.mask_row_digest, row_digest, "warn")

    yield _Row("G04", "features.taps", c.features.taps, list(config.taps))
    yield _Row("G14", "features.stage", c.features.stage, STAGE)
    for name in Dimensions.__struct_fields__:
        code = "G17" if name in ("conv_kernel", "conv_group", "rank") else "G11"
        yield _Row(code, f"dimensions.{name}", getattr(c.dimensions, name), getattr(config, name))

    yield _Row("G11", "attention.layer_types", c.attention.layer_types, list(config.layer_types))
    yield _Row("G13", "attention.is_causal", c.attention.is_causal, list(config.is_causal))
    yield _Row("G11", "attention.window", c.attention.window, config.window)
    yield _Row("G15", "attention.rope_theta", c.attention.rope_theta, config.rope_theta)
    yield _Row("G15", "attention.positions", c.attention.positions, POSITIONS)

    probabilities, rules = laws(config)
    yield _Row("G16", "proposal.block_size", c.proposal.block_size, config.block_size)
    yield _Row("G16", "proposal.max_proposals", c.proposal.max_proposals, config.max_proposals)
    yield _Row("G17", "proposal.candidates", c.proposal.candidates, config.top_k)
    yield _Row("G17", "proposal.probabilities", c.proposal.probabilities, probabilities)
    yield _Row("G17", "proposal.rules", sorted(c.proposal.rules), rules)

    yield _Row("G00", "cache.owner", c.cache.owner, OWNER)
    yield _Row("G00", "cache.rows", c.cache.rows, ROWS)
    yield _Row("G00", "cache.rollback", c.cache.rollback, ROLLBACK)


def contract_of(
    config: DraftConfig, listing: DraftListing, target: TargetFacts, *, contraction: str, licence: str
) -> DraftContract:
    """Return the contract that a draft trained on this target has.

    Args:
        config: of the draft.
        listing: its files.
        target: that it was trained for.
        contraction: that its features were made with.
        licence: that its author gives it.
    """
    probabilities, rules = laws(config)
    return DraftContract(
        FORMAT,
        VERSION,
        DraftIdentity(config.architecture, listing.digest, licence),
        TargetIdentity(
            target.name,
            target.revision,
            target.digest,
            target.quantisation,
            target.num_layers,
            target.hidden_size,
            target.num_streams,
        ),
        TokenizerIdentity(
            target.tokenizer_revision,
            target.tokenizer_digest,
            target.vocab_size,
            target.num_ids,
            sorted(target.stop_ids),
            target.pad_id,
            config.mask_token_id,
            target.row_digest(config.mask_token_id) if target.row_digest else "",
        ),
        FeatureContract(list(config.taps), contraction, STAGE),
        Dimensions(*(getattr(config, name) for name in Dimensions.__struct_fields__)),
        AttentionContract(
            list(config.layer_types), list(config.is_causal), config.window, config.rope_theta, POSITIONS
        ),
        ProposalContract(config.block_size, config.max_proposals, config.top_k, probabilities, rules),
        CacheContract(OWNER, ROWS, ROLLBACK),
    )
