"""The decoder's `Attend` for evaluation: whole windows of text, one layer at a time, through the engine's own cache.

Each call is one layer of one window. Its tokens go into pages in chunks, as a long prompt's do, and every query reads
what the engine would read for it: sealed pages decoded, the page being filled in float. So what evaluation finds is
what the engine's arithmetic gives, not an imitation of it.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cann_llm_quant.quant.kv import KvPlan
from cann_llm_quant.runner.kv_store import KvStore
from cann_llm_quant.runner.page_policy import PagePolicy
from cann_llm_quant.runner.paged_attention import PagedAttend
from cann_llm_quant.runner.spans import Pattern, Span

CHUNK = 256


class CachedWindows:
    """Pages of one window of one layer at a time.

    `window` gives the tokens of the windows, which are run in order for each layer in turn: sensitive ones keep their
    page in float.
    """

    def __init__(
        self,
        plan: KvPlan,
        windows: Int[Tensor, "windows seq"],
        *,
        page_size: int,
        pattern: Pattern | None = None,
        chunk: int = CHUNK,
    ) -> None:
        self._plan, self._windows, self._pattern, self._chunk = plan, windows, pattern, chunk
        self._policy = PagePolicy(page_size, plan.recent_tokens, plan.sink_tokens, plan.sensitive, plan.quantizes, None)
        self._spans = [self._cut(row.tolist()) for row in windows]
        self._layer, self._window = -1, 0
        self._store: KvStore | None = None

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "1 heads seq dim"],
        k: Float[Tensor, "1 kv seq dim"],
        v: Float[Tensor, "1 kv seq dim"],
        *,
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "1 heads seq dim"]:
        """Attention of one window's tokens over themselves, by way of the cache."""
        if layer != self._layer:
            self._layer, self._window = layer, 0
            self._store = self._pages(layer, k)
        assert self._store is not None
        mixed = []
        for span in self._spans[self._window]:
            attend = PagedAttend(self._store, [span], recent_pages=self._policy.recent_pages, pattern=self._pattern)
            part = slice(span.start, span.start + span.count)
            mixed.append(attend(0, q[:, :, part], k[:, :, part], v[:, :, part], scale=scale, window=window))
        self._window += 1
        return torch.cat(mixed, 2)

    def _pages(self, layer: int, k: Float[Tensor, "1 kv seq dim"]) -> KvStore:
        pages = self._policy.pages(k.shape[2])
        return KvStore(
            KvPlan(self._plan.layers[layer : layer + 1], self._plan.scales[layer : layer + 1]),
            kv_heads=k.shape[1],
            head_dim=k.shape[3],
            page_size=self._policy.page_size,
            sealed=pages,
            floats=pages,
            dtype=k.dtype,
            device=k.device,
        )

    def _cut(self, tokens: list[int]) -> list[Span]:
        """Chunks of a window; page q is sealed page q or float page q of the store."""
        ends = [*range(self._chunk, len(tokens), self._chunk), len(tokens)]
        starts = [0, *ends[:-1]]
        return [
            Span(start, end - start, self._table(tokens, start), self._table(tokens, end))
            for start, end in zip(starts, ends, strict=True)
        ]

    def _table(self, tokens: list[int], end: int) -> tuple[int, ...]:
        total = self._policy.pages(len(tokens))
        kinds = self._policy.kinds(tokens, 0, end)
        return tuple(page + total * (kind == "float") for page, kind in enumerate(kinds))
