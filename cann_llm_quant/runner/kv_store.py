"""The memory of the key-value cache: pages of every layer, sealed ones in the layer's schemes, float ones as computed.

Page ids `0 .. sealed - 1` are sealed pages, `sealed .. sealed + floats - 1` float pages. A layer's buffers are laid out

    keys, values   [kv heads, pages, page size, head dim]        (codes of sealed pages: int4 two to a byte)
    scales         [heads | 1, pages, tokens | 1, groups]        (dynamic schemes; static scales belong to the layer)

with pages behind heads, so that the pages of a sequence, taken in order, are its keys as attention wants them.
Who owns which page is not known here (see pages.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from cann_llm_quant.errors import UsageError
from cann_llm_quant.quant.kv import KvPlan, KvScheme, decode, encode, kv_scale, page_range

PageKind = Literal["sealed", "float"]
Places = slice | Tensor


@dataclass(frozen=True)
class Selection:
    """Pages to read, in an order; ids of each kind count from 0. Made once by `KvStore.select`, used in every layer."""

    count: int
    sealed_count: int
    sealed: Places
    sealed_at: Places
    floats: Places
    floats_at: Places


class SealedPages:
    """Sealed keys, or values, of one layer in one scheme (None: in the compute dtype)."""

    def __init__(
        self,
        where: str,
        scheme: KvScheme | None,
        scale: Tensor | None,
        zero_point: Tensor | None,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        heads, pages, tokens, dim = shape
        self.scheme, self.dtype = scheme, dtype
        self.scale: Tensor | None = None
        self.zero_point: Tensor | None = None
        if scheme is None:
            self.codes = torch.empty(shape, dtype=dtype, device=device)
            return
        width = scheme.code_shape(heads, tokens, dim)[-1]
        self.codes = torch.empty(heads, pages, tokens, width, dtype=scheme.code_dtype, device=device)
        if scheme.is_plain:
            return
        a, b, c = scheme.scale_shape(heads, tokens, dim)
        if scheme.dynamic:
            self.scale = torch.empty(a, pages, b, c, dtype=torch.bfloat16, device=device)
            if not scheme.symmetric:
                self.zero_point = torch.empty(a, pages, b, c, dtype=torch.int16, device=device)
            return
        for given in (scale, zero_point):
            if given is not None and given.shape != (a, b, c):
                raise UsageError(
                    f"{where}: {scheme.label()} takes scales of shape [{a}, {b}, {c}], got {list(given.shape)}; "
                    "calibrate the KV cache for this model"
                )
        assert scale is not None, "a plan holds the scales of its static schemes"
        self.scale = scale.to(device)[:, None]
        self.zero_point = None if zero_point is None or scheme.symmetric else zero_point.to(device)[:, None]

    def put(self, pages: Int[Tensor, "count"], x: Float[Tensor, "heads count tokens dim"]) -> None:
        """Encode whole pages."""
        scheme = self.scheme
        if scheme is None or scheme.is_plain:
            self.codes[:, pages] = x.to(self.codes.dtype)
            return
        scale, zero_point = self.scale, self.zero_point
        if scheme.dynamic:
            assert self.scale is not None
            scale, zero_point = kv_scale(*page_range(x.transpose(0, 1), scheme), scheme)
            scale = scale.transpose(0, 1)
            self.scale[:, pages] = scale
            if zero_point is not None:
                assert self.zero_point is not None
                zero_point = zero_point.transpose(0, 1)
                self.zero_point[:, pages] = zero_point
        self.codes[:, pages] = encode(x, scheme, scale, zero_point)

    def take(self, pages: Places) -> Float[Tensor, "heads count tokens dim"]:
        """Decode pages to the compute dtype."""
        codes = _take(self.codes, pages)
        if self.scheme is None:
            return codes
        if not self.scheme.dynamic:
            return decode(codes, self.scheme, self.scale, self.zero_point, self.dtype)
        assert self.scale is not None
        zero_point = None if self.zero_point is None else _take(self.zero_point, pages)
        return decode(codes, self.scheme, _take(self.scale, pages), zero_point, self.dtype)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """What belongs to single pages, by name; pages are dimension 1."""
        yield "codes", self.codes
        if self.scheme is not None and self.scheme.dynamic:
            assert self.scale is not None
            yield "scale", self.scale
            if self.zero_point is not None:
                yield "zero_point", self.zero_point


class KvStore:
    """Pages of all layers.

    Raises UsageError when a scheme does not fit the heads, or a static scale does not fit its scheme.
    """

    def __init__(
        self,
        plan: KvPlan,
        *,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        sealed: int,
        floats: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.plan, self.page_size, self.dtype, self.device = plan, page_size, dtype, device
        self.sealed, self.floats = sealed, floats
        shape = (kv_heads, floats, page_size, head_dim)
        self._floats = [[torch.empty(shape, dtype=dtype, device=device) for _ in "kv"] for _ in plan.layers]
        shape = (kv_heads, sealed, page_size, head_dim)
        self._sealed = [
            [
                SealedPages(f"layer {i} keys", layer.k, scales.k_scale, scales.k_zero, shape, dtype, device),
                SealedPages(f"layer {i} values", layer.v, scales.v_scale, scales.v_zero, shape, dtype, device),
            ]
            for i, (layer, scales) in enumerate(zip(plan.layers, plan.scales, strict=True))
        ]

    def is_sealed(self, page: int) -> bool:
        """Whether the id is that of a sealed page; -1, no page, is not."""
        return 0 <= page < self.sealed

    def slot(self, page: int, token: int) -> int:
        """Where `write` puts a token of a float page."""
        return (page - self.sealed) * self.page_size + token

    def write(
        self,
        layer: int,
        slots: Int[Tensor, "tokens"],
        k: Float[Tensor, "heads tokens dim"],
        v: Float[Tensor, "heads tokens dim"],
    ) -> None:
        """Store keys and values of single tokens in float pages; `slots` are those of `slot`."""
        for buffer, x in zip(self._floats[layer], (k, v), strict=True):
            buffer.flatten(1, 2).index_copy_(1, slots, x)

    def seal(
        self,
        layer: int,
        pages: Int[Tensor, "count"],
        k: Float[Tensor, "heads count tokens dim"],
        v: Float[Tensor, "heads count tokens dim"],
    ) -> None:
        """Encode whole pages into sealed ones, in the layer's schemes."""
        for part, x in zip(self._sealed[layer], (k, v), strict=True):
            part.put(pages, x)

    def select(self, pages: Sequence[int]) -> Selection:
        """What `read` needs to read these pages, of any mixture of kinds, in this order."""
        sealed = [i for i, page in enumerate(pages) if page < self.sealed]
        floats = [i for i, page in enumerate(pages) if page >= self.sealed]
        return Selection(
            len(pages),
            len(sealed),
            self._places([pages[i] for i in sealed]),
            self._places(sealed),
            self._places([pages[i] - self.sealed for i in floats]),
            self._places(floats),
        )

    def _places(self, numbers: list[int]) -> Places:
        """A slice where the numbers follow one another: slices are read without copying."""
        first = numbers[0] if numbers else 0
        if numbers == list(range(first, first + len(numbers))):
            return slice(first, first + len(numbers))
        return torch.tensor(numbers, device=self.device)

    def read(
        self, layer: int, pages: Selection
    ) -> tuple[Float[Tensor, "heads tokens dim"], Float[Tensor, "heads tokens dim"]]:
        """Keys and values of pages side by side in the compute dtype; only these pages are decoded.

        They may be views of the store: read them before the next write. Tokens not written yet are arbitrary numbers.
        """
        k, v = (
            _mix(pages, buffer, sealed).flatten(1, 2)
            for buffer, sealed in zip(self._floats[layer], self._sealed[layer], strict=True)
        )
        return k, v

    def dump(self, page: int) -> dict[str, Tensor]:
        """A copy of one page of all layers as it is stored."""
        kind, index = self._kind(page)
        return {name: buffer[:, index].clone() for name, buffer in self._buffers(kind)}

    def restore(self, page: int, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `dump` returned, into a page of the same kind."""
        kind, index = self._kind(page)
        for name, buffer in self._buffers(kind):
            buffer[:, index] = tensors[name].to(self.device)

    def page_bytes(self, kind: PageKind) -> int:
        """Bytes of one page in all layers, scales included."""
        heads, _, tokens, dim = self._floats[0][0].shape
        return page_bytes(self.plan, kind, heads, dim, tokens, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.sealed * self.page_bytes("sealed") + self.floats * self.page_bytes("float")

    def _kind(self, page: int) -> tuple[PageKind, int]:
        return ("sealed", page) if page < self.sealed else ("float", page - self.sealed)

    def _buffers(self, kind: PageKind) -> Iterator[tuple[str, Tensor]]:
        for layer, (floats, sealed) in enumerate(zip(self._floats, self._sealed, strict=True)):
            for part, buffer, pages in zip("kv", floats, sealed, strict=True):
                if kind == "float":
                    yield f"{layer}.{part}", buffer
                else:
                    yield from ((f"{layer}.{part}.{name}", tensor) for name, tensor in pages.buffers())


def page_bytes(plan: KvPlan, kind: PageKind, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page in all layers, before there is a store. Raises UsageError when a scheme does not fit."""
    plain = kv_heads * page_size * head_dim * dtype.itemsize
    schemes = [scheme for layer in plan.layers for scheme in (layer.k, layer.v)]
    if kind == "float":
        return plain * len(schemes)
    return sum(plain if s is None else s.page_bytes(kv_heads, page_size, head_dim) for s in schemes)


def _take(buffer: Shaped[Tensor, "heads pages ..."], pages: Places) -> Shaped[Tensor, "heads count ..."]:
    return buffer[:, pages] if isinstance(pages, slice) else buffer.index_select(1, pages)


def _mix(pages: Selection, floats: Tensor, sealed: SealedPages) -> Tensor:
    if pages.sealed_count == 0:
        return _take(floats, pages.floats)
    if pages.sealed_count == pages.count:
        return sealed.take(pages.sealed)
    out = floats.new_empty(floats.shape[0], pages.count, *floats.shape[2:])
    out[:, pages.sealed_at] = sealed.take(pages.sealed)
    out[:, pages.floats_at] = _take(floats, pages.floats)
    return out
