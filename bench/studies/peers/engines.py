"""Engines behind one small face, so that the same loop asks and times all of them. Entry point: `ENGINES`.

Nothing of a peer, nor of flashnext, is imported before it is asked for: each runs in an environment of its
own. Every engine decodes greedily, one token at a time, and goes on after stop tokens. The peers are driven
at their model's own face (a call a token, the largest logit), without what their command lines add: no
sampler, no detokeniser, no chunk of one token at the end of a prompt.
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


class FlashNext:
    """This project."""

    def __init__(self, model: Path, budget_bytes: int | None, options: dict[str, Any]) -> None:
        """Open with a resident target, or with every expert in memory."""
        from mlx_flashnext.engine.engine import Engine as Opened
        from mlx_flashnext.engine.plan import PlanRequest

        every = None if budget_bytes else options.pop("experts")
        options.pop("experts", None)
        request = PlanRequest(budget_bytes, context_tokens=256, slots_per_layer=every, **options)
        self._engine = Opened.open(model, request)

    def answer(self, prompt: Sequence[int]) -> Iterator[int]:
        """Answer in a new session."""
        from mlx_flashnext.engine.events import Token
        from mlx_flashnext.engine.sampler import SamplingParams

        session = self._engine.session()
        for event in session.generate(prompt, SamplingParams(temperature=0.0)):
            if isinstance(event, Token):
                yield event.token_id

    def facts(self) -> dict[str, Any]:
        """Return the plan's main figures and the store's hit rate."""
        plan, store = self._engine.plan, self._engine.target.store.statistics()
        hits = sum(layer.num_hits + layer.num_prefetched for layer in store.layers)
        return {
            "planned_bytes": plan.total_bytes,
            "slots_per_layer": plan.slots_per_layer,
            "hit_rate": hits / max(1, sum(layer.num_demands for layer in store.layers)),
        }


class MlxVlm:
    """mlx-vlm: every expert in memory, or its `moe_offload` directory with a cache of experts."""

    def __init__(self, model: Path, budget_bytes: int | None, options: dict[str, Any]) -> None:
        """Load; a budget is that of its expert cache alone."""
        import mlx.core as mx
        from mlx_vlm.utils import load_model

        del options
        is_offloaded = budget_bytes is not None
        more = {"expert_cache_gb": budget_bytes / 1e9} if budget_bytes is not None else {}
        self._mx, self._model = mx, load_model(model, lazy=True, **more)
        if not is_offloaded:
            mx.eval(self._model.parameters())

    def answer(self, prompt: Sequence[int]) -> Iterator[int]:
        """Call the language model."""
        mx, language = self._mx, self._model.language_model
        cache = language.make_cache()
        language._position_ids = language._rope_deltas = None
        tokens = list(prompt)
        while True:
            logits = language(mx.array([tokens]), cache=cache, logits_to_keep=1).logits[0, -1]
            tokens = [int(mx.argmax(logits).item())]
            yield tokens[0]

    def facts(self) -> dict[str, Any]:
        """Return what its store counts."""
        store = getattr(self._model, "moe_offload_store", None)
        return dict(store.stats()) if store is not None else {}


class Transformers:
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
                yield tokens[0]

    def facts(self) -> dict[str, Any]:
        """Return nothing."""
        return {}


class LlamaCpp:
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
