"""`LLMEngine`: a model, packed or float, that continues texts and gives logits.

Requests share one batch: whoever comes while others run joins them at the next step. Keys and values lie in pages, in
the precision that the model's KV policy says. Everything that a request can get wrong is refused before the first
forward pass.
"""

import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cann_llm_quant.checkpoint.hub import locate
from cann_llm_quant.device import resolve_device, resolve_dtype
from cann_llm_quant.errors import RequestError, UsageError
from cann_llm_quant.export.packed import open_source
from cann_llm_quant.models.decoder import DecoderModel
from cann_llm_quant.quant.kv import KvPlan
from cann_llm_quant.runner.answer import Chunk, Generation
from cann_llm_quant.runner.batch import Batch, EngineStats
from cann_llm_quant.runner.kv_policy import KvChoice, resolve_plan, stored_page_size
from cann_llm_quant.runner.options import EngineOptions
from cann_llm_quant.runner.service import Handle, Service
from cann_llm_quant.runner.settings import GenerationSettings, check_token_ids
from cann_llm_quant.runner.weights import LoadedModel, load_shared
from cann_llm_quant.tokenizer import adds_bos, encode


class LLMEngine:
    """Runs one model. `path` is a directory that `quantize` wrote or any float checkpoint that can be opened.

    `kv_cache` replaces the model's own KV policy: a SPEC as in kv_recipe.py (`int8`, `float`), or more than that as a
    `KvChoice`. The other keywords are the fields of `EngineOptions`. `revision` is of a hub id; `allow_pickle` admits
    `.bin` weights. Engines of one process that name the same model share its weights. Raises InputError's kinds when
    the model cannot be used.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "fp32",
        kernel: str = "auto",
        kv_cache: str | KvChoice | KvPlan | None = None,
        revision: str | None = None,
        allow_pickle: bool = False,
        **options: Any,
    ) -> None:
        _check_names(options)
        place, precision = resolve_device(device), resolve_dtype(dtype)
        folder = str(locate(str(path), revision=revision, allow_pickle=allow_pickle))
        loaded = load_shared(folder, place, precision, kernel, allow_pickle=allow_pickle)
        if not isinstance(kv_cache, KvPlan):
            choice = kv_cache if isinstance(kv_cache, KvChoice) else KvChoice(kv_cache)
            with open_source(folder, allow_pickle=allow_pickle) as checkpoint:
                kv_cache = resolve_plan(checkpoint, choice, loaded.model.arch.num_layers)
                options = {"page_size": stored_page_size(checkpoint)} | options
        self._adopt(loaded, kv_cache, EngineOptions(**options))

    @classmethod
    def from_parts(
        cls,
        model: DecoderModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: frozenset[int] = frozenset(),
        kv_cache: KvPlan | None = None,
        **options: Any,
    ) -> "LLMEngine":
        """An engine over a model that is in memory already."""
        engine = cls.__new__(cls)
        _check_names(options)
        engine._adopt(LoadedModel(model, tokenizer, end_ids), kv_cache, EngineOptions(**options))
        return engine

    def _adopt(self, loaded: LoadedModel, plan: KvPlan | None, options: EngineOptions) -> None:
        self._loaded = loaded  # as long as it lives, other engines find it
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.end_ids = loaded.end_ids
        self.options = options
        self.kv_plan = plan or KvPlan.plain(loaded.model.arch.num_layers)
        batch = Batch(loaded, self.kv_plan, options)
        self.max_context = batch.limits.max_context
        self._adds_bos = adds_bos(loaded.tokenizer)
        self._service = Service(batch)
        self._close = weakref.finalize(self, self._service.close, drain=False)

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more requests, wait for those that run (at most `timeout` seconds) and cancel the rest."""
        if self._close.detach():
            self._service.close(drain=drain, timeout=timeout)

    def submit(self, prompt: str | Sequence[int], max_new_tokens: int = 128, **settings: Any) -> Handle:
        """Queue a request; the keywords are the fields of `GenerationSettings`. May be called from any thread.

        Raises RequestError, which names the field, for what cannot be meant or can never be computed, OverloadedError
        where the queue is full.
        """
        known = {field.name for field in fields(GenerationSettings)}
        unknown = sorted(settings.keys() - known)
        if unknown:
            raise RequestError(
                unknown[0],
                f"unknown generation settings {', '.join(unknown)}; known are {', '.join(sorted(known))}",
            )
        wanted = GenerationSettings(max_new_tokens=max_new_tokens, **settings)
        wanted.check_vocabulary(self.model.arch.vocab_size)
        return self._service.submit(tuple(self.prompt_ids(prompt)), wanted, owner=self)

    def generate(self, prompt: str | Sequence[int], max_new_tokens: int = 128, **settings: Any) -> Generation:
        """Continue a text or token ids, and wait for the whole answer; see `submit`."""
        return self.submit(prompt, max_new_tokens, **settings).result()

    def stream(self, prompt: str | Sequence[int], max_new_tokens: int = 128, **settings: Any) -> Iterator[Chunk]:
        """`generate`, one token at a time; the chunks' texts joined are its text.

        Refuses bad requests at once.
        """
        return iter(self.submit(prompt, max_new_tokens, **settings))

    async def generate_async(
        self, prompt: str | Sequence[int], max_new_tokens: int = 128, **settings: Any
    ) -> Generation:
        """`generate` in an event loop; a cancelled task cancels the request."""
        return await self.submit(prompt, max_new_tokens, **settings).result_async()

    def stream_async(
        self, prompt: str | Sequence[int], max_new_tokens: int = 128, **settings: Any
    ) -> AsyncIterator[Chunk]:
        """`stream` in an event loop."""
        return aiter(self.submit(prompt, max_new_tokens, **settings))

    def stats(self) -> EngineStats:
        """Counts of requests, tokens and pages at this moment."""
        return self._service.stats()

    def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt: a text by the tokenizer's own BOS rule, ids as they are, nothing at all as BOS.

        Raises RequestError for ids outside the vocabulary, or an empty prompt where there is no BOS.
        """
        if isinstance(prompt, str):
            ids = encode(self.tokenizer, prompt, bos=self._adds_bos)
        else:
            ids = list(prompt)
        check_token_ids("prompt", ids, self.model.arch.vocab_size)
        if ids:
            return ids
        bos: int | None = self.tokenizer.bos_token_id
        if bos is None:
            raise RequestError(
                "prompt", "prompt is empty and the tokenizer has no BOS token to start from; write a prompt"
            )
        return [bos]

    def logits(self, windows: Int[Tensor, "windows seq"]) -> Iterator[Float[Tensor, "seq vocab"]]:
        """Each window's logits, one window after another, as evaluation takes them; no cache is involved."""
        if windows.shape[1] > self.max_context:
            raise UsageError(f"a window of {windows.shape[1]} tokens exceeds the context of {self.max_context}")
        return (self._window_logits(ids) for ids in windows)

    @torch.no_grad()
    def _window_logits(self, ids: Int[Tensor, " seq"]) -> Float[Tensor, "seq vocab"]:
        return self.model(ids[None].to(self.model.embedding.device))[0]


def _check_names(given: dict[str, Any]) -> None:
    known = {field.name for field in fields(EngineOptions)}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise UsageError(f"unknown engine options {', '.join(unknown)}; known are {', '.join(sorted(known))}")
