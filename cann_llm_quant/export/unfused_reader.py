"""Quantized sources whose family fuses or renames its matrices, shown as those of a plain family, in codes.

A row of codes has scales and zero points of its own, or the one scale of its matrix, so that a part of a fused matrix
is its rows of all of them: nothing is rounded again. Which rows belong to whom says `checkpoint/fused_layout.py`, as
for sources in float.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Shaped
from torch import Tensor

from cann_llm_quant.checkpoint.fused_layout import Rows
from cann_llm_quant.checkpoint.unfused import Part, UnfusedCheckpoint, unfused
from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.export.kv_section import KvCache
from cann_llm_quant.export.layout import Reader, StoredLinear
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.scheme import QuantizedTensor


class UnfusedReader:
    """`inner`'s linears under the names that `shown` gives them; implements `layout.Reader`.

    Raises UnsupportedError for fused matrices in tiles, which reach over the rows of several parts.
    """

    def __init__(self, inner: Reader, shown: UnfusedCheckpoint) -> None:
        self._inner = inner
        self._parts: Mapping[str, Part] = {
            name.removesuffix(".weight"): replace(part, source=part.source.removesuffix(".weight"))
            for name, part in shown.parts.items()
            if name.endswith(".weight") and part.source.removesuffix(".weight") in inner.linears
        }
        names = {part.source: name for name, part in self._parts.items()}
        self.layout: str = inner.layout
        self.kv_cache: KvCache = inner.kv_cache
        self.tied: Mapping[str, str] = {names.get(a, a): names.get(b, b) for a, b in inner.tied.items()}
        self.linears: Mapping[str, StoredLinear] = {
            module: self._linear(module, part, shown) for module, part in self._parts.items()
        }

    def _linear(self, module: str, part: Part, shown: UnfusedCheckpoint) -> StoredLinear:
        linear, name = self._inner.linears[part.source], f"{module}.weight"
        if part.rows is not None and linear.scheme.strategy == "tile":
            raise UnsupportedError(
                f"{shown.path}: {part.source} is {linear.scheme.label()}, whose tiles cannot be parted with the rows "
                "of several linears; give the float model"
            )
        if name in shown.unit_rows:
            raise UnsupportedError(
                f"{shown.path}: {part.source} is quantized, but has to be scaled first; give the float model"
            )
        out, columns = shown.tensors[name].shape
        return replace(linear, shape=(out, columns), tensors=(name,))

    def quantized(self, module: str) -> QuantizedTensor:
        """One linear in its stored codes. Raises what the layout's reader raises."""
        part = self._parts[module]
        whole = self._inner.quantized(part.source)
        if part.rows is None:
            return whole
        zero_point = None if whole.zero_point is None else _rows_of(whole.zero_point, part.rows)
        return replace(
            whole,
            stored=_rows_of(whole.codes, part.rows),
            scale=whole.scale if whole.scheme.strategy == "tensor" else _rows_of(whole.scale, part.rows),
            zero_point=zero_point,
        )

    def inputs(self, module: str) -> InputQuantizer | None:
        """How the input of one linear is quantized: as that of the matrix which it is a part of."""
        return self._inner.inputs(self._parts[module].source)


def unfused_packed(packed: PackedCheckpoint[Reader], dtype: torch.dtype | None) -> PackedCheckpoint[Reader]:
    """`packed` itself, or a view of it under a plain family's names where its own has a known fused layout.

    Raises UnsupportedError and CheckpointError as `checkpoint.unfused` does.
    """
    shown = unfused(packed)
    if not isinstance(shown, UnfusedCheckpoint):
        return packed
    return PackedCheckpoint(shown, UnfusedReader(packed.reader, shown), dtype)


def _rows_of(matrix: Shaped[Tensor, "rows columns"], rows: Rows) -> Shaped[Tensor, "part columns"]:
    return torch.cat([matrix[run.start : run.stop] for run in rows])
