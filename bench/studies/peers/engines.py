"""Engines behind one small face, so that the same loop asks and times all of them. Entry point: `ENGINES`.

Nothing of a peer, nor of flashnext, is imported before it is asked for: each runs in an environment of its
own. Every engine decodes greedily, one token at a time unless it is given an MTP module, and goes on after
stop tokens. The peers are driven at their model's own face (a call a token, the largest logit), without what
their command lines add: no sampler, no detokeniser, no chunk of one token at the end of a prompt.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol


class Engine(Protocol):
    """A loaded model."""

    def answer(self, prompt: Sequence[int]) -> Iterator[int]:
        """Begin an empty sequence; yield its tokens, the first as soon as the prompt is read."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return what it says of itself."""
        ...

    def counts(self) -> dict[str, int]:
        """Return passes of the target so far, the tokens they gave, and bytes of experts fetched.

        Bytes count wherever they came from, a cache of the kernel's too.
        """
        ...


class _OneByOne:
    """Counts of an engine whose every pass gives a token and whose fetches nobody counts."""

    passes = 0

    def counts(self) -> dict[str, int]:
        """Return a token a pass."""
        return {"passes": self.passes, "pass_tokens": self.passes, "fetched_bytes": 0}


class FlashNext:
    """This project."""

    def __init__(self, model: Path, budget_bytes: int | None, options: dict[str, Any]) -> None:
        """Open with a resident target, or with so many experts of every layer in memory."""
        from mlx_flashnext.engine.engine import Engine as Opened
        from mlx_flashnext.engine.laps import Laps
        from mlx_flashnext.engine.plan import PlanRequest

        class Passes(Laps):
            """Counts cycles and the rows that they keep."""

            passes = kept = 0

            def cycle(self, num_rows: int, num_kept: int) -> None:
                del num_rows
                self.passes, self.kept = self.passes + 1, self.kept + num_kept

        self._passes = Passes()
        every = None if budget_bytes else options.pop("experts")
        options.pop("experts", None)
        request = PlanRequest(budget_bytes, context_tokens=256, slots_per_layer=every, **options)
        self._engine = Opened.open(model, request)

    def answer(self, prompt: Sequence[int]) -> Iterator[int]:
        """Answer in a new session."""
        from mlx_flashnext.engine.events import Token
        from mlx_flashnext.engine.sampler import SamplingParams

        session = self._engine.session(is_guarded=False, laps=self._passes)
        for event in session.generate(prompt, SamplingParams(temperature=0.0)):
            if isinstance(event, Token):
                yield event.token_id

    def close(self) -> None:
        """Free everything."""
        self._engine.close()

    def facts(self) -> dict[str, Any]:
        """Return the plan's main figures and the store's hit rate."""
        plan, store = self._engine.plan, self._engine.target.store.statistics()
        hits = sum(layer.num_hits + layer.num_prefetched for layer in store.layers)
        return {
            "planned_bytes": plan.total_bytes,
            "slots_per_layer": plan.slots_per_layer,
            "hit_rate": hits / max(1, sum(layer.num_demands for layer in store.layers)),
        }

    def counts(self) -> dict[str, int]:
        """Return cycles, the rows they kept, and what its store has read."""
        fetched = self._engine.target.store.statistics().physical_bytes
        return {"passes": self._passes.passes, "pass_tokens": self._passes.kept, "fetched_bytes": fetched}


class MlxVlm:
    """mlx-vlm: every expert in memory, or its `moe_offload` directory with a cache of experts.

    With a drafter its own rounds decode (`mlx_vlm.speculative.mtp`), in blocks of the anchor and a proposal.
    """

    def __init__(self, model: Path, budget_bytes: int | None, options: dict[str, Any]) -> None:
        """Load; a budget is that of its expert cache alone."""
        import mlx.core as mx
        from mlx_vlm.utils import load_model

        is_offloaded = budget_bytes is not None
        more = {"expert_cache_gb": budget_bytes / 1e9} if budget_bytes is not None else {}
        self._mx, self._model = mx, load_model(model, lazy=True, **more)
        if not is_offloaded:
            mx.eval(self._model.parameters())
        self._passes, self._drafter = 0, None
        if "drafter" in options:
            from mlx_vlm.speculative.drafters import load_drafter

            self._drafter, _ = load_drafter(options["drafter"], "mtp")
            mx.eval(self._drafter.parameters())

    def answer(self, prompt: Sequence[int]) -> Iterator[int]:
        """Call the language model, or have its rounds do so."""
        if self._drafter is not None:
            yield from self._drafted(prompt)
            return
        mx, language = self._mx, self._model.language_model
        cache = language.make_cache()
        language._position_ids = language._rope_deltas = None
        tokens = list(prompt)
        while True:
            logits = language(mx.array([tokens]), cache=cache, logits_to_keep=1).logits[0, -1]
            tokens = [int(mx.argmax(logits).item())]
            self._passes += 1
            yield tokens[0]

    def _drafted(self, prompt: Sequence[int]) -> Iterator[int]:
        from mlx_vlm.speculative.mtp import _mtp_rounds as rounds

        mx, language = self._mx, self._model.language_model
        cache, ids = language.make_cache(), mx.array([list(prompt)])
        language._position_ids = language._rope_deltas = None
        read = language(ids, cache=cache, logits_to_keep=1, return_hidden=True, return_shared_kv=True)
        first = int(mx.argmax(read.logits[0, -1]).item())
        yield first
        answer = rounds(
            self._model, self._drafter, cache, read.hidden_states[-1], read.shared_kv_states,
            prompt_tokens=ids, first_bonus=first, max_tokens=1 << 20, draft_block_size=2,
            sampler=lambda logits: mx.argmax(logits, axis=-1), token_dtype=ids.dtype, greedy_sampling=True,
        )  # fmt: skip
        for token, _ in answer:
            yield int(token)

    def facts(self) -> dict[str, Any]:
        """Return what its store counts."""
        store = getattr(self._model, "moe_offload_store", None)
        return dict(store.stats()) if store is not None else {}

    def counts(self) -> dict[str, int]:
        """Return calls or rounds, their tokens, and misses of its store in bytes."""
        passes = getattr(self._drafter, "speculative_total_rounds", self._passes)
        accepted = int(getattr(self._drafter, "speculative_total_accepted", 0))
        store = getattr(self._model, "moe_offload_store", None)
        fetched = 0 if store is None or not store._lru else store._misses * next(iter(store._lru.values()))
        return {"passes": passes, "pass_tokens": passes + accepted, "fetched_bytes": fetched}


class Transformers(_OneByOne):
    """The Hugging Face reference, in float32."""

    def __init__(self, model: Path, budget_bytes: int | None, options: dict[str, Any]) -> None:
        """Load everything."""
        import torch
        from transformers import AutoModelForImageTextToText

        del budget_bytes, options
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._torch = torch
        self._model = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()

    def answer(self, prompt: Sequence[int]) -> Iterator[int]:
        """Call the model."""
        torch, past, tokens = self._torch, None, list(prompt)
        with torch.no_grad():
            while True:
                out = self._model(input_ids=torch.tensor([tokens]), past_key_values=past, use_cache=True)
                past, tokens = out.past_key_values, [int(out.logits[0, -1].argmax())]
                self.passes += 1
                yield tokens[0]

    def facts(self) -> dict[str, Any]:
        """Return nothing."""
        return {}


class LlamaCpp(_OneByOne):
    """llama.cpp in the build that the `xllamacpp` package ships, through its own server's `/completions`."""

    def __init__(self, model: Path, budget_bytes: int | None, options: dict[str, Any]) -> None:
        """Load a GGUF file, mapped."""
        import xllamacpp

        del budget_bytes, options
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx, params.n_parallel, params.n_gpu_layers = 1024, 1, 0
        params.warmup = False
        threads = len(os.sched_getaffinity(0))
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self._server = xllamacpp.Server(params)

    def answer(self, prompt: Sequence[int]) -> Iterator[int]:
        """Ask for one token after the other; the server keeps the sequence."""
        tokens = list(prompt)
        while True:
            wish = {
                "prompt": tokens, "n_predict": 1, "temperature": 0.0, "top_k": 1, "cache_prompt": True,
                "n_probs": 1,
            }  # fmt: skip
            said = self._server.handle_completions(wish)["choices"][0]["logprobs"]["content"]
            tokens.append(int(said[0]["id"]))
            self.passes += 1
            yield tokens[-1]

    def facts(self) -> dict[str, Any]:
        """Return nothing."""
        return {}


ENGINES: Final[dict[str, Callable[[Path, int | None, dict[str, Any]], Engine]]] = {
    "flashnext": FlashNext,
    "mlx-vlm": MlxVlm,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
}
"""Makers by name: checkpoint, bytes it may use, options of its own."""
