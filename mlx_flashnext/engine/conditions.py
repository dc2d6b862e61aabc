"""Under what conditions figures were taken: what METRICS.md asks every report to state.

Entry: `conditions_of`.

Nothing here measures. A commit is not among the facts: whoever runs an installed flashnext has none; studies
in `bench/` add theirs.
"""

import platform
from collections.abc import Collection
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from mlx_flashnext.checkpoint import Checkpoint
from mlx_flashnext.config import Fp8Blocks, MatrixSpec
from mlx_flashnext.engine.machine import Machine, usable_cpus
from mlx_flashnext.engine.plan import Plan


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a row of figures was taken under; sizes in bytes.

    Attributes:
        model_digest: identity of the checkpoint.
        quantisation: of experts and trunk.
        machine: processor or device, system.
        kernels: `fused` where pieces of a pass are replayed, else `plain`.
        num_cpus: processors this process may use.
        budget_bytes: the memory target.
        planned_bytes: what the plan uses of it.
        slots_per_layer: experts of each layer in memory.
        page_cache: `cold`, `warm` or `as-is`.
        page_cache_how: how it was made so.
        disk: `real`, or `simulated disk: ...`.
        prompt_set: what was asked.
        sampling: how tokens were chosen.
    """

    flashnext: str
    mlx: str
    python: str
    model: str
    model_digest: str
    layout: str
    quantisation: str
    machine: str
    backend: str
    kernels: str
    num_cpus: int
    memory_bytes: int
    budget_bytes: int
    planned_bytes: int
    slots_per_layer: int
    num_experts: int
    num_layers: int
    record_bytes: int
    num_readers: int
    policy: str
    draft: str
    num_draft_tokens: int
    hints: str
    page_cache: str
    page_cache_how: str
    disk: str
    prompt_set: str
    sampling: str

    @property
    def expert_budget_bytes(self) -> int:
        """Bytes of the expert slots alone."""
        return self.slots_per_layer * self.num_layers * self.record_bytes

    def to_dict(self) -> dict[str, object]:
        """Return the facts by name."""
        return {**asdict(self), "expert_budget_bytes": self.expert_budget_bytes}


def conditions_of(
    checkpoint: Checkpoint,
    machine: Machine,
    plan: Plan,
    *,
    model: str,
    hints: str = "off",
    page_cache: str,
    page_cache_how: str,
    disk: str = "real",
    prompt_set: str,
    sampling: str = "greedy, stop tokens ignored",
) -> Conditions:
    """Return the facts of a run."""
    return Conditions(
        flashnext=version_of("flashnext"),
        mlx=version_of("mlx"),
        python=platform.python_version(),
        model=model,
        model_digest=checkpoint.digest,
        layout=checkpoint.layout,
        quantisation=quantisation_of(checkpoint),
        machine=f"{machine.name}, {platform.system()} {platform.release()}",
        backend=machine.backend,
        kernels=machine.kernels,
        num_cpus=usable_cpus(),
        memory_bytes=machine.total_bytes,
        budget_bytes=plan.budget_bytes,
        planned_bytes=plan.total_bytes,
        slots_per_layer=plan.slots_per_layer,
        num_experts=plan.num_experts,
        num_layers=len(checkpoint.experts),
        record_bytes=max(layout.record.record_bytes for layout in checkpoint.experts.values()),
        num_readers=plan.num_readers,
        policy=plan.policy,
        draft=plan.draft,
        num_draft_tokens=plan.num_draft_tokens,
        hints=hints,
        page_cache=page_cache,
        page_cache_how=page_cache_how,
        disk=disk,
        prompt_set=prompt_set,
        sampling=sampling,
    )


def version_of(distribution: str) -> str:
    """Return an installed version; a source tree that was not installed has none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def quantisation_of(checkpoint: Checkpoint) -> str:
    """Return how experts and trunk are stored, in words."""
    experts = [spec for layout in checkpoint.experts.values() for spec in layout.specs.values()]
    trunk = [tensor.spec for tensor in checkpoint.tensors.values() if tensor.role == "matrix"]
    return f"experts {_named(experts)}; trunk {_named(trunk)}"


def _named(specs: Collection[MatrixSpec | None]) -> str:
    return ", ".join(sorted({_words(spec) for spec in specs}))


def _words(spec: MatrixSpec | None) -> str:
    if spec is None:
        return "none"
    if isinstance(spec, Fp8Blocks):
        return "fp8 in blocks"
    return f"{spec.mode} {spec.bits}-bit group {spec.group_size}"
