"""`LLMEngine`: a model, packed or float, that continues texts and gives logits.

One request at a time: the prompt goes through the model in chunks of `PREFILL_CHUNK` tokens into a
key-value cache, then each sampled token alone. Everything that a request can get wrong is refused before
the first forward pass.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cann_llm_quant.device import resolve_device, resolve_dtype
from cann_llm_quant.errors import RequestError, UsageError
from cann_llm_quant.models.decoder import DecoderModel, head
from cann_llm_quant.runner.kv_cache import KVCache
from cann_llm_quant.runner.sampler import TokenLogprobs, make_generator, sample
from cann_llm_quant.runner.settings import GenerationSettings, check_token_ids
from cann_llm_quant.runner.stop import StopTexts
from cann_llm_quant.runner.text_stream import TextStream, byte_tokens
from cann_llm_quant.runner.weights import LoadedModel, load_packed
from cann_llm_quant.tokenizer import adds_bos, encode

PREFILL_CHUNK = 512

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Timings:
    """Seconds for the prompt (up to the first new token) and for the tokens after it."""

    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class Chunk:
    """One new token and the text that it completes (possibly none).

    The last chunk says why it is the last.
    """

    token_id: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class Generation:
    """A whole answer.

    `token_ids` holds every sampled token, the end token included; its text is not in `text`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    timings: Timings


class LLMEngine:
    """Runs one model. `path` is a directory that `quantize` wrote or any float checkpoint that can be opened.

    `revision` is of a hub id; `allow_pickle` admits `.bin` weights. `max_context` lowers the model's own limit.
    Raises InputError's kinds when the model cannot be used.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "fp32",
        kernel: str = "auto",
        max_context: int | None = None,
        revision: str | None = None,
        allow_pickle: bool = False,
    ) -> None:
        place, precision = resolve_device(device), resolve_dtype(dtype)
        loaded = load_packed(str(path), place, precision, kernel, revision=revision, allow_pickle=allow_pickle)
        self._adopt(loaded, max_context)

    @classmethod
    def from_parts(
        cls,
        model: DecoderModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: frozenset[int] = frozenset(),
        max_context: int | None = None,
    ) -> "LLMEngine":
        """An engine over a model that is in memory already."""
        engine = cls.__new__(cls)
        engine._adopt(LoadedModel(model, tokenizer, end_ids), max_context)
        return engine

    def _adopt(self, loaded: LoadedModel, max_context: int | None) -> None:
        limit = loaded.model.arch.max_positions
        if max_context is not None and not 1 <= max_context <= limit:
            raise UsageError(f"max_context {max_context} must lie between 1 and the model's {limit} positions")
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.end_ids = loaded.end_ids
        self.max_context = max_context or limit
        self._adds_bos = adds_bos(loaded.tokenizer)
        self._byte_of = byte_tokens(loaded.tokenizer)

    def generate(self, prompt: str | Sequence[int], max_new_tokens: int = 128, **settings: Any) -> Generation:
        """Continue a text or token ids; the keywords are the fields of `GenerationSettings`.

        Raises RequestError for a prompt or setting that cannot be, before any work.
        """
        started = time.perf_counter()
        ids = self.prompt_ids(prompt)
        first = started
        chunks: list[Chunk] = []
        for chunk in self.stream(ids, max_new_tokens, **settings):
            first = first if chunks else time.perf_counter()
            chunks.append(chunk)
        reason = chunks[-1].finish_reason
        assert reason is not None
        return Generation(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(chunk.token_id for chunk in chunks),
            finish_reason=reason,
            prompt_tokens=len(ids),
            timings=Timings(first - started, time.perf_counter() - first),
        )

    def stream(self, prompt: str | Sequence[int], max_new_tokens: int = 128, **settings: Any) -> Iterator[Chunk]:
        """`generate`, one token at a time; the chunks' texts joined are its text.

        Refuses bad requests at once.
        """
        known = {field.name for field in fields(GenerationSettings)}
        unknown = sorted(settings.keys() - known)
        if unknown:
            raise RequestError(
                unknown[0], f"unknown generation settings {', '.join(unknown)}; known are {', '.join(sorted(known))}"
            )
        wanted = GenerationSettings(max_new_tokens=max_new_tokens, **settings)
        wanted.check_vocabulary(self.model.arch.vocab_size)
        ids = self.prompt_ids(prompt)
        if len(ids) + wanted.max_new_tokens > self.max_context:
            raise RequestError(
                "max_new_tokens",
                f"{len(ids)} prompt tokens and max_new_tokens {wanted.max_new_tokens} exceed the context of "
                f"{self.max_context}; shorten the prompt or ask for fewer tokens",
            )
        return self._stream(ids, wanted)

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
        """Each window's logits, one window after another, as evaluation takes them."""
        if windows.shape[1] > self.max_context:
            raise UsageError(f"a window of {windows.shape[1]} tokens exceeds the context of {self.max_context}")
        return (self._window_logits(ids) for ids in windows)

    @torch.no_grad()
    def _window_logits(self, ids: Int[Tensor, " seq"]) -> Float[Tensor, "seq vocab"]:
        return self.model(ids[None].to(self.model.embedding.device))[0]

    def _stream(self, ids: list[int], settings: GenerationSettings) -> Iterator[Chunk]:
        cache = self._new_cache(len(ids) + settings.max_new_tokens)
        generator = make_generator(settings)
        text = TextStream(self._decode, ids, self._byte_of)
        stops = StopTexts(settings.stop, settings.include_stop)
        ends = self._ends(settings)
        feed = ids
        output: list[int] = []
        for index in range(settings.max_new_tokens):
            drawn = sample(self._next_logits(feed, cache), settings, generator, ids, output)
            token = drawn.token_id
            feed = [token]
            output.append(token)
            ended = token in ends
            last = ended or index + 1 == settings.max_new_tokens
            piece = "" if ended else text.push(token)
            shown = stops.push(piece + text.finish() if last else piece)
            reason: FinishReason | None = "stop" if ended or stops.stopped else "length" if last else None
            if last and not stops.stopped:
                shown += stops.finish() + ends.get(token, "")
            yield Chunk(token, shown, reason, drawn.logprobs)
            if reason is not None:
                return

    def _new_cache(self, length: int) -> KVCache:
        arch, embedding = self.model.arch, self.model.embedding
        return KVCache(
            arch.num_layers,
            1,
            arch.num_kv_heads,
            arch.head_dim,
            length,
            dtype=embedding.dtype,
            device=embedding.device,
        )

    @torch.no_grad()
    def _next_logits(self, ids: list[int], cache: KVCache) -> Float[Tensor, " vocab"]:
        """Logits after the last of `ids`, which are appended to the cache; only that token goes through the head.

        Dynamic RoPE takes the length up to the end of `ids` for all of them, so that chunks do not show, as
        transformers' `generate` does.
        """
        device = self.model.embedding.device
        end = cache.length + len(ids)
        for start in range(0, len(ids), PREFILL_CHUNK):
            chunk = torch.tensor([ids[start : start + PREFILL_CHUNK]], device=device)
            positions = torch.arange(cache.length, cache.length + chunk.shape[1], device=device)[None]
            hidden = self.model.hidden(chunk, positions, cache, length=end)
            cache.advance(chunk.shape[1])
        return head(self.model.arch, self.model.norm, self.model.head_op, hidden[:, -1:])[0, 0]

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _ends(self, settings: GenerationSettings) -> dict[int, str]:
        """Ids that end this request, with the text to show for each.

        Special tokens whose name is a stop text count among them: decoding leaves them out, so no text would match.
        """
        ends = dict.fromkeys(settings.stop_ids, "") | ({} if settings.ignore_eos else dict.fromkeys(self.end_ids, ""))
        for name in self.tokenizer.all_special_tokens:
            if name in settings.stop:
                ends[self.tokenizer.convert_tokens_to_ids(name)] = name if settings.include_stop else ""
        return ends
