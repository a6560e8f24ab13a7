"""A quantized source of any layout, read as a float checkpoint: its linears appear as `<module>.weight` and are
dequantized on load.

The architecture map, the streamed evaluation and the export to float work on it as on any other checkpoint; the
runner and the other exporters ask for the packed form instead (`quantized`).
"""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint, TensorInfo
from cann_llm_quant.checkpoint.source_quant import CONFIG_KEYS
from cann_llm_quant.checkpoint.view import CheckpointView
from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.export.ascend_kv import is_c8_tensor
from cann_llm_quant.export.kv_scales import is_kv_scale
from cann_llm_quant.export.layout import Reader
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.scheme import QuantizedTensor

# `quantization` is MLX's name, `quantize` MindIE's.
_QUANTIZATION_KEYS = (*CONFIG_KEYS, "quantization", "quantize")

AnyReader = TypeVar("AnyReader", bound=Reader, covariant=True)


class PackedCheckpoint(CheckpointView, Generic[AnyReader]):
    """`inner` seen in float through its layout's `reader`.

    Dequantized weights are `dtype` (None: the type that the reader gives each). Raises CheckpointError when a
    quantized linear is in no file.
    """

    def __init__(self, inner: Checkpoint, reader: AnyReader, dtype: torch.dtype | None = torch.float32) -> None:
        super().__init__(inner)
        self.reader = reader
        self._dtype = dtype
        self.modules = frozenset(reader.linears)
        self._tensors = self._float_view()

    def _float_view(self) -> dict[str, TensorInfo]:
        parts = {name: module for module, linear in self.reader.linears.items() for name in linear.tensors}
        view: dict[str, TensorInfo] = {}
        for name, info in self.inner.tensors.items():
            module = parts.get(name)
            if module is not None:
                view.setdefault(f"{module}.weight", self._weight(module, info.file))
            elif not (is_kv_scale(name) or is_c8_tensor(name) or self._repeats_tied(name)):
                view[name] = info
        missing = [module for module in self.modules if f"{module}.weight" not in view]
        if missing:
            raise CheckpointError(f"{self.inner.path}: {min(missing)} is quantized, but its weight is in no file")
        return view

    def _weight(self, module: str, file: str) -> TensorInfo:
        linear = self.reader.linears[module]
        out, columns = linear.shape
        dtype = self._dtype or linear.dtype
        return TensorInfo(f"{module}.weight", dtype, linear.shape, file, out * columns * dtype.itemsize)

    def _repeats_tied(self, name: str) -> bool:
        module, _, suffix = name.rpartition(".")
        return module in self.reader.tied and suffix != "bias"

    @property
    def config(self) -> dict[str, Any]:
        """`config.json` without the quantization section, which is not true of the float view."""
        return {key: value for key, value in self.inner.config.items() if key not in _QUANTIZATION_KEYS}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Float tensors by name."""
        return self._tensors

    def load(self, name: str) -> Tensor:
        """One tensor; a packed linear's weight is dequantized."""
        weight = self.quantized(name.removesuffix(".weight")) if name.endswith(".weight") else None
        return self.inner.load(name) if weight is None else weight.dequantize(self._tensors[name].dtype)

    def quantized(self, module: str) -> QuantizedTensor | None:
        """A linear in its stored codes, None when it is stored in float. Raises CheckpointError."""
        return self.reader.quantized(module) if module in self.modules else None

    def inputs(self, module: str) -> InputQuantizer | None:
        """How a linear's input is quantized, None when it stays in float. Raises CheckpointError."""
        return self.reader.inputs(module) if module in self.modules else None


def input_quantizers(checkpoint: Checkpoint) -> dict[str, InputQuantizer]:
    """How the linears' inputs are quantized, by module: whoever runs a checkpoint's layers must apply it.

    Empty for a float checkpoint. Raises CheckpointError for stored ranges that cannot be used.
    """
    if not isinstance(checkpoint, PackedCheckpoint):
        return {}
    found = {module: checkpoint.inputs(module) for module in checkpoint.reader.linears}
    return {module: inputs for module, inputs in found.items() if inputs is not None}
