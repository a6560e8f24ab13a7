"""An MLX folder with its linears sorted by what codes can say of them; see `mlx.py` for the layout.

`biases` are any numbers, codes know whole zero points z. One is taken from a group where -biases/scales is z within
rounding: where the product z * scale rounds to the stored bias, or lies at most a sixteenth of a step beside it (MLX
rounds the scale after it has chosen the bias). The first says nothing where rounding is wider than half a step, as of 8
bits in bfloat16. A linear all of whose groups are such is `whole` (`symmetric` where every z is 2^(b-1)) and is read in
its codes. Any other, as training of scales and biases makes them and 8-bit codes with bfloat16 scales mostly are, is
shown as a plain float weight, exactly as MLX computes it; its codes are not used.

To tell, the scales and biases of every linear are read once when the folder is opened, a sixteenth of its size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint, TensorInfo
from cann_llm_quant.checkpoint.view import CheckpointView
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.export.mlx import BITS, MODE
from cann_llm_quant.export.weight_only import finite, stored_matrix, stored_modules
from cann_llm_quant.models.config_fields import ConfigFields
from cann_llm_quant.quant.bit_stream import BitStream, as_bytes
from cann_llm_quant.shown import shown

Kind = Literal["symmetric", "whole", "float"]

_SECTION = "quantization"
_NEAR = 1 / 16


@dataclass(frozen=True)
class MlxLinear:
    """One linear as it is stored."""

    kind: Kind
    bits: int
    group_size: int
    shape: tuple[int, int]
    dtype: torch.dtype


class MlxFolder(CheckpointView):
    """A folder in MLX's layout; implements `checkpoint.Checkpoint`, with linears of kind `float` as plain weights.

    Raises CheckpointError for shapes that contradict the config, UnsupportedError for other modes than affine and for
    stacks of experts.
    """

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner)
        self.inner = inner
        section = ConfigFields(inner.config).section(_SECTION)
        assert section is not None, "asked for by is_mlx"
        self._fields = ConfigFields(section.values, f"{inner.path}/config.json: {_SECTION}")
        self.linears = {module: self._described(module) for module in stored_modules(inner, "scales")}
        self._dense = {f"{name}.weight": name for name, linear in self.linears.items() if linear.kind == "float"}
        hidden = {f"{name}.{part}" for name in self._dense.values() for part in ("scales", "biases")}
        self._tensors = {
            name: self._shown(info) if name in self._dense else info
            for name, info in inner.tensors.items()
            if name not in hidden
        }

    def _described(self, module: str) -> MlxLinear:
        bits, size = self._form(module)
        info = self.inner.tensors.get(f"{module}.weight")
        if info is not None and len(info.shape) == 3:
            raise UnsupportedError(f"{self.inner.path}: {info.name} is a stack of experts, which is not read from MLX")
        out, words = stored_matrix(self.inner, f"{module}.weight", torch.uint32)
        scales = stored_matrix(self.inner, f"{module}.scales", None)
        biases = stored_matrix(self.inner, f"{module}.biases", None)
        columns = scales[1] * size
        if scales != biases or scales[0] != out or words * 32 != columns * bits:
            raise CheckpointError(
                f"{self.inner.path}: {module} has weight [{out}, {words}], scales {list(scales)} and biases "
                f"{list(biases)}, which are not those of {bits} bits in groups of {size}"
            )
        scale, bias = self.affine(module)
        zeros = whole_zeros(scale, bias, bits)
        kind: Kind = "float" if zeros is None else "whole"
        if zeros is not None and bool((zeros == 0).all()):
            kind = "symmetric"
        return MlxLinear(kind, bits, size, (out, columns), scale.dtype)

    def _form(self, module: str) -> tuple[int, int]:
        """Bits and group size of a module, those of the section where it has none of its own."""
        fields, own = self._fields, self._fields.values.get(module, True)
        if isinstance(own, Mapping):
            fields = ConfigFields(own, f"{fields.where}: {shown(module)}")
        elif own is not True:
            raise CheckpointError(f"{fields.where}: {shown(module)} is {shown(own)}, but {module}.scales is stored")
        mode = fields.text("mode", MODE)
        if mode != MODE:
            raise UnsupportedError(f"{fields.where}: mode {shown(mode)} is not read, only {MODE}")
        bits = fields.integer("bits", default=4)
        if bits not in BITS:
            raise UnsupportedError(f"{fields.where}: {bits} bits are not read, only {', '.join(map(str, BITS))}")
        return bits, fields.integer("group_size", default=64)

    def affine(self, module: str) -> tuple[Float[Tensor, "out groups"], Float[Tensor, "out groups"]]:
        """Scales and biases of a linear. Raises CheckpointError where they are not finite."""
        scales, biases = (f"{module}.{part}" for part in ("scales", "biases"))
        where = f"{self.inner.path}: "
        return finite(where + scales, self.inner.load(scales)), finite(where + biases, self.inner.load(biases))

    def codes(self, module: str) -> BitStream:
        """The codes of a linear."""
        words = self.inner.load(f"{module}.weight").view(torch.int32)
        return BitStream(as_bytes(words), self.linears[module].bits)

    def _shown(self, info: TensorInfo) -> TensorInfo:
        linear = self.linears[self._dense[info.name]]
        rows, columns = linear.shape
        return TensorInfo(info.name, linear.dtype, linear.shape, info.file, rows * columns * linear.dtype.itemsize)

    def _dequantized(self, module: str) -> Float[Tensor, "out columns"]:
        linear = self.linears[module]
        scale, bias = (part.to(torch.float32).unsqueeze(-1) for part in self.affine(module))
        fields = self.codes(module).codes().to(torch.float32).add_(1 << (linear.bits - 1))
        groups = fields.view(linear.shape[0], -1, linear.group_size)
        return groups.mul_(scale).add_(bias).view(linear.shape).to(linear.dtype)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Stored tensors by name; linears of kind `float` as their weights."""
        return self._tensors

    def load(self, name: str) -> Tensor:
        """One tensor; that of a linear of kind `float` is dequantized."""
        return self._dequantized(self._dense[name]) if name in self._dense else self.inner.load(name)


def is_mlx(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of an MLX folder."""
    section = config.get(_SECTION)
    return isinstance(section, Mapping) and "group_size" in section and "bits" in section


def whole_zeros(
    scale: Float[Tensor, "out groups"], bias: Float[Tensor, "out groups"], bits: int
) -> Int8[Tensor, "out groups"] | None:
    """Signed zero points z - 2^(b-1) that these affine numbers mean; None where a group's is not whole or no code."""
    wide, target = scale.to(torch.float32), bias.to(torch.float32)
    quotient = torch.where(wide == 0, 1 << (bits - 1), -target / wide)
    zeros = quotient.round()
    near = (quotient - zeros).abs() <= _NEAR
    tells = torch.finfo(bias.dtype).eps * (1 << bits) < 1
    product = torch.tensor(tells) & ((-zeros * wide).to(bias.dtype) == bias)
    fits = (zeros >= 0) & (zeros < 1 << bits)
    empty = (wide != 0) | (target == 0)
    if not bool(((near | product) & fits & empty).all()):
        return None
    return (zeros - (1 << (bits - 1))).to(torch.int8)
