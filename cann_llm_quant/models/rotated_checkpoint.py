"""A checkpoint whose residual stream and values are rotated: the same function, without outlier channels.

Every tensor is rotated when it is loaded, one at a time, so that nothing downstream differs (QuaRot, Ashkboos et al.
2024, arXiv:2404.00456; here only what folds exactly). With R1 for the residual stream x and R2 for every head's values:

    x becomes x R1          embedding E R1;  o, down: R1ᵀ W, bias b R1
    norms keep their input's length, so their gains g move into what reads them, and become 1
                            q, k, gate, up, router, head: (W g) R1
    values become v R2      v: R2ᵀ (W g) R1 for each head, bias b R2;  o: R1ᵀ W R2

The final norm's gain makes the head another matrix than the embedding, so that a tied head is stored on its own; where
that gain is the same for all channels it commutes with R1 and stays. Routers read the residual stream and are rotated
as well: they choose the same experts, but their weights are no longer the source's. Tensors are rounded to the dtype
that they are stored in, which costs what storing them costs anyhow.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint, TensorInfo
from cann_llm_quant.checkpoint.view import CheckpointView
from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.models.arch import Arch, Layer, LinearSpec
from cann_llm_quant.quant.hadamard import Rotation, random_rotation

_ATTENTION_INPUTS = ("q", "k", "v")
_MLP_INPUTS = ("gate", "up", "router", "shared_gate")
_OUTPUTS = ("o", "down")
_KNOWN_PARAMETERS = {"input_norm", "post_norm", "q_norm", "k_norm"}
_BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class _Change:
    """What happens to one tensor: columns times the gain of a norm, rows rotated, columns rotated."""

    gain: str | None = None
    rows: Rotation | None = None
    columns: Rotation | None = None


class RotatedCheckpoint(CheckpointView):
    """`inner` seen rotated; `seed` draws the rotations' signs.

    Raises UnsupportedError for sizes without a Hadamard matrix and for layers whose norms do not stand right after the
    residual stream.
    """

    def __init__(self, inner: Checkpoint, arch: Arch, seed: int) -> None:
        super().__init__(inner)
        self._arch, self._seed = arch, seed
        self._stream = random_rotation(arch.hidden_size, seed)
        self._norms: set[str] = set()
        self._changes: dict[str, _Change] = {}
        for layer in arch.layers:
            self._plan_layer(layer, random_rotation(arch.head_dim, seed + 1 + layer.index))
        self.unties_head = self._plan_outer()
        self._tensors = dict(inner.tensors)
        if self.unties_head:
            embedding, head = inner.tensors[arch.embedding_name], f"{arch.head_module}.weight"
            self._tensors[head] = TensorInfo(head, embedding.dtype, embedding.shape, embedding.file, embedding.nbytes)

    def _plan_layer(self, layer: Layer, values: Rotation) -> None:
        names = {parameter.role: parameter.name for parameter in layer.parameters}
        if not set(names) <= _KNOWN_PARAMETERS:
            odd = sorted(set(names) - _KNOWN_PARAMETERS)[0]
            raise UnsupportedError(f"layer {layer.index} has a {odd}, which a rotation would not leave as it is")
        self._norms |= {names["input_norm"], names["post_norm"]}
        for spec in layer.linears:
            self._plan_linear(spec, names, values)

    def _plan_linear(self, spec: LinearSpec, norms: Mapping[str, str], values: Rotation) -> None:
        weight, bias, kind = f"{spec.module}.weight", f"{spec.module}.bias", spec.role.rsplit(".", 1)[-1]
        if kind in _OUTPUTS:
            self._changes[weight] = _Change(rows=self._stream, columns=values if kind == "o" else None)
            self._changes[bias] = _Change(columns=self._stream)
        elif kind in _ATTENTION_INPUTS:
            turned = values if kind == "v" else None
            self._changes[weight] = _Change(norms["input_norm"], rows=turned, columns=self._stream)
            if turned is not None:
                self._changes[bias] = _Change(columns=turned)
        elif kind in _MLP_INPUTS:
            self._changes[weight] = _Change(norms["post_norm"], columns=self._stream)
        else:
            raise UnsupportedError(f"{spec.module} is a {spec.role}, of which no rotation is known; leave out --rotate")

    def _plan_outer(self) -> bool:
        """Embedding, final norm and head; whether a tied head must be stored on its own."""
        arch, head = self._arch, f"{self._arch.head_module}.weight"
        gain = arch.norm_offset + self.inner.load(arch.final_norm_name).to(torch.float32)
        moved = None if bool((gain == gain[0]).all()) else arch.final_norm_name
        if moved is not None:
            self._norms.add(moved)
        self._changes[arch.embedding_name] = _Change(columns=self._stream)
        self._changes[head] = _Change(moved, columns=self._stream)
        return arch.tied_head and moved is not None

    def load(self, name: str) -> Tensor:
        """One tensor, rotated, in its stored dtype. Raises CheckpointError when it is not there."""
        if name in self._norms:
            stored = self.inner.load(name)
            return torch.full_like(stored, 1 - self._arch.norm_offset)
        untied = self.unties_head and name == f"{self._arch.head_module}.weight"
        tensor = self.inner.load(self._arch.embedding_name if untied else name)
        change = self._changes.get(name)
        return tensor if change is None else self._changed(tensor, change)

    def _changed(self, tensor: Tensor, change: _Change) -> Tensor:
        if tensor.dim() == 1:
            return self._changed(tensor.unsqueeze(0), change).squeeze(0)
        wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else torch.float64
        dtype = tensor.dtype
        if change.rows is not None:
            tensor = change.rows.rotate(tensor.T.to(wide)).T
        return _by_rows(tensor, partial(self._with_columns, change, self._gain(change)), wide, dtype)

    def _gain(self, change: _Change) -> Tensor | None:
        return None if change.gain is None else self._arch.norm_offset + self.inner.load(change.gain).double()

    @staticmethod
    def _with_columns(change: _Change, gain: Tensor | None, rows: Tensor) -> Tensor:
        scaled = rows if gain is None else rows * gain.to(rows)
        return scaled if change.columns is None else change.columns.rotate(scaled)

    @property
    def config(self) -> dict[str, Any]:
        """The source's config; a head that had to be untied is said to be."""
        config = dict(self.inner.config)
        return config | {"tie_word_embeddings": False} if self.unties_head else config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The source's tensors, and the head where it had to be untied."""
        return self._tensors

    def fingerprint(self) -> str:
        """Of the source and the rotations."""
        return hashlib.sha256(f"{self.inner.fingerprint()} rotated by seed {self._seed}".encode()).hexdigest()


def _by_rows(tensor: Tensor, change: Callable[[Tensor], Tensor], wide: torch.dtype, dtype: torch.dtype) -> Tensor:
    """`change` applied to some rows at a time in the dtype `wide`; the result in `dtype`."""
    changed = torch.empty(tensor.shape, dtype=dtype)
    step = max(1, _BLOCK_ELEMENTS // tensor.shape[1])
    for r in range(0, tensor.shape[0], step):
        changed[r : r + step] = change(tensor[r : r + step].to(wide)).to(dtype)
    return changed
