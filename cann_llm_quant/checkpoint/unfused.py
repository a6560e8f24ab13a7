"""A checkpoint whose family fuses or renames its matrices, shown as one of a family that every runtime knows.

Names, shapes and config are those of the plain family; a part of a fused matrix is cut out when it is loaded, as a
tensor of its own. Nothing of the model's own code is needed or run. Which rows belong to whom says `fused_layout.py`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint, TensorInfo
from cann_llm_quant.checkpoint.fused_config import FusedConfig
from cann_llm_quant.checkpoint.fused_layout import Fused, FusedLayout, Reading, Rows
from cann_llm_quant.checkpoint.fused_layouts import known_layouts
from cann_llm_quant.checkpoint.view import CheckpointView
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.shown import shown, shown_name

# Matrices of q, k and v under the names that families give them; none that is shown may keep one.
FUSED_NAMES = ("W_pack", "query_key_value", "qkv_proj", "wqkv", "Wqkv", "c_attn")

_BLOCK_ROWS = 1024


@dataclass(frozen=True)
class Part:
    """Where a shown tensor comes from: a stored tensor, and its rows in order (None: all of it)."""

    source: str
    rows: Rows | None = None


class UnfusedCheckpoint(CheckpointView):
    """`inner` under the names and the config of a plain family; implements `base.Checkpoint`.

    Raises CheckpointError where a fused matrix has other rows than the config implies, UnsupportedError for models of
    the layout's type that no plain family describes.
    """

    def __init__(self, inner: Checkpoint, layout: FusedLayout) -> None:
        super().__init__(inner)
        self._reading = layout.read(FusedConfig(inner.config, f"{inner.path}/config.json"))
        self._parts = _parts(inner, layout, self._reading)
        self._tensors = MappingProxyType(
            {name: _shown(name, part, inner.tensors[part.source]) for name, part in self._parts.items()}
        )

    @property
    def parts(self) -> Mapping[str, Part]:
        """Where each shown tensor comes from."""
        return self._parts

    @property
    def unit_rows(self) -> tuple[str, ...]:
        """The shown tensors whose rows are scaled to length 1 on load."""
        return self._reading.unit_rows

    @property
    def config(self) -> dict[str, Any]:
        """The plain family's."""
        return self._reading.config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor under its plain name, in the order in which the data lies."""
        return self._tensors

    def load(self, name: str) -> Tensor:
        """One tensor on the CPU in its stored dtype, owning its memory. Raises CheckpointError when it is not there."""
        part = self._parts.get(name)
        if part is None:
            raise CheckpointError(f"{self.path} has no tensor {shown(name)}; its files hold {len(self._parts)} others")
        tensor: Tensor = self.inner.load(part.source)
        if part.rows is not None:
            tensor = torch.cat([tensor[rows.start : rows.stop] for rows in part.rows])
        return with_unit_rows(tensor) if name in self._reading.unit_rows else tensor


def unfused(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` itself, or a view of it under a plain family's names where its own has a known fused layout.

    Raises UnsupportedError naming a fused matrix that no layout explains, and what `UnfusedCheckpoint` raises.
    """
    model_type = checkpoint.config.get("model_type")
    layout = known_layouts().get(model_type) if isinstance(model_type, str) else None
    applies = layout is not None and any(layout.mark in name for name in checkpoint.tensors)
    opened = UnfusedCheckpoint(checkpoint, layout) if layout and applies else checkpoint
    left = next((name for name in opened.tensors if _is_fused(name)), None)
    if left is not None:
        raise UnsupportedError(
            f"{checkpoint.path}: tensor {shown_name(left)} holds q, k and v in one matrix, in rows that model_type "
            f"{shown(model_type)} does not explain to this version; known are {', '.join(known_layouts())}; give a "
            "model with split ones"
        )
    return opened


def with_unit_rows(matrix: Shaped[Tensor, "rows columns"]) -> Shaped[Tensor, "rows columns"]:
    """Every row divided by its length, computed in float32 for some rows at a time; rows of zeros stay."""
    scaled = torch.empty_like(matrix)
    for block, out in zip(torch.split(matrix, _BLOCK_ROWS), torch.split(scaled, _BLOCK_ROWS), strict=True):
        wide = block.float()
        out.copy_(wide / wide.norm(dim=1, keepdim=True).clamp(min=1e-12))
    return scaled


def _parts(inner: Checkpoint, layout: FusedLayout, reading: Reading) -> dict[str, Part]:
    """Every shown tensor by name."""
    parts: dict[str, Part] = {}
    for stored in inner.tensors.values():
        for name, part in _shown_parts(stored, layout, reading, inner.path):
            if name in parts:
                raise CheckpointError(
                    f"{inner.path}: tensors {parts[name].source} and {stored.name} both are {name}; keep one of them"
                )
            parts[name] = part
    return parts


def _shown_parts(stored: TensorInfo, layout: FusedLayout, reading: Reading, path: Path) -> Iterable[tuple[str, Part]]:
    """What one stored tensor is shown as: names and parts."""
    match = re.fullmatch(rf"{re.escape(layout.layer_prefix)}(\d+)\.(.+)", stored.name)
    if match is None:
        yield layout.outer.get(stored.name, stored.name), Part(stored.name)
        return
    prefix, below = f"model.layers.{match[1]}.", match[2]
    module, dot, kind = below.rpartition(".")
    plain = layout.modules.get(module, module)
    if isinstance(plain, str):
        yield f"{prefix}{plain}{dot}{kind}", Part(stored.name)
        return
    for part, rows in zip(plain.parts, _rows(stored, plain, reading, path), strict=True):
        yield f"{prefix}{part}.{kind}", Part(stored.name, rows)


def _rows(stored: TensorInfo, fused: Fused, reading: Reading, path: Path) -> tuple[Rows, ...]:
    """The rows of each part. Raises CheckpointError where the matrix has not as many as there should be."""
    rows = fused.rows(reading.sizes)
    expected = sum(len(run) for part in rows for run in part)
    found = stored.shape[0] if stored.shape else 0
    if found != expected:
        raise CheckpointError(
            f"{path}: tensor {stored.name} has {found} rows, but config.json implies {expected} ({reading.sizes})"
        )
    return rows


def _shown(name: str, part: Part, stored: TensorInfo) -> TensorInfo:
    if part.rows is None:
        return replace(stored, name=name)
    shape = (sum(len(run) for run in part.rows), *stored.shape[1:])
    return replace(stored, name=name, shape=shape, nbytes=prod(shape) * stored.dtype.itemsize)


def _is_fused(name: str) -> bool:
    module, _, kind = name.rpartition(".")
    return kind in ("weight", "bias") and module.rpartition(".")[2] in FUSED_NAMES
