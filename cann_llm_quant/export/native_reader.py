"""A native directory read as a float checkpoint: packed linears appear as `<module>.weight` and are dequantized on
load.

The architecture map, the streamed evaluation and the export to float work on it as on any other checkpoint; the
runner asks for the packed form instead (`quantized`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.checkpoint.base import Checkpoint, TensorInfo
from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.export import native
from cann_llm_quant.export.inference_config import InferenceConfig, load_inference_config
from cann_llm_quant.quant.scheme import QuantizedTensor


class NativeCheckpoint:
    """`inner` seen in float; dequantized weights are `dtype` (None: each linear's scale dtype)."""

    def __init__(
        self, inner: Checkpoint, inference: InferenceConfig, dtype: torch.dtype | None = torch.float32
    ) -> None:
        self.inner, self.inference = inner, inference
        self._dtype = dtype
        self.modules = frozenset(native.quantized_modules(inner))
        self._tensors = self._float_view()

    def _float_view(self) -> dict[str, TensorInfo]:
        view: dict[str, TensorInfo] = {}
        for name, info in self.inner.tensors.items():
            module, _, suffix = name.rpartition(".")
            if module not in self.modules or suffix not in native.SUFFIXES:
                view[name] = info
            elif suffix == "weight_packed":
                out, columns = self._shape(module)
                dtype = self._dtype or self.inner.tensors[f"{module}.weight_scale"].dtype
                weight = f"{module}.weight"
                view[weight] = TensorInfo(weight, dtype, (out, columns), info.file, out * columns * dtype.itemsize)
        return view

    def _shape(self, module: str) -> tuple[int, int]:
        name = f"{module}.weight_shape"
        if name not in self.inner.tensors or self.inner.tensors[name].shape != (2,):
            raise CheckpointError(f"{self.inner.path}: {name} must hold two numbers, rows and columns")
        out, columns = self.inner.load(name).tolist()
        return int(out), int(columns)

    @property
    def path(self) -> Path:
        """The directory."""
        return self.inner.path

    @property
    def config(self) -> dict[str, Any]:
        """`config.json` without the quantization section, which is not true of the float view."""
        return {key: value for key, value in self.inner.config.items() if key != "quantization_config"}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Float tensors by name."""
        return self._tensors

    def load(self, name: str) -> Tensor:
        """One tensor; a packed linear's weight is dequantized."""
        weight = self.quantized(name.removesuffix(".weight")) if name.endswith(".weight") else None
        return self.inner.load(name) if weight is None else weight.dequantize(self._tensors[name].dtype)

    def quantized(self, module: str) -> QuantizedTensor | None:
        """A linear in its stored codes, None when it is stored in float."""
        return native.read_linear(self.inner, module) if module in self.modules else None

    def companion_files(self) -> dict[str, bytes]:
        """Tokenizer, generation config and the like, byte for byte."""
        return self.inner.companion_files()

    def fingerprint(self) -> str:
        """The packed files' fingerprint."""
        return self.inner.fingerprint()

    def close(self) -> None:
        """Release file handles."""
        self.inner.close()

    def __enter__(self) -> "NativeCheckpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_native(path: Path) -> bool:
    """Whether the folder was written by this tool's `quantize`."""
    return (path / "inference_config.json").is_file()


def open_native(path: Path, dtype: torch.dtype | None = torch.float32) -> NativeCheckpoint:
    """Open a directory that `quantize` wrote.

    Raises CheckpointError when files are missing or contradict each other.
    """
    inference = load_inference_config(path)
    return NativeCheckpoint(open_checkpoint(str(path), accept_quantized=True), inference, dtype)
