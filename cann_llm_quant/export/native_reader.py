"""A native directory read as a float checkpoint: quantized linears appear as `<module>.weight` and are dequantized on
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
from cann_llm_quant.errors import CheckpointError, UsageError
from cann_llm_quant.export import native
from cann_llm_quant.export.inference_config import FILE_NAME, InferenceConfig, load_inference_config
from cann_llm_quant.export.kv_scales import is_kv_scale
from cann_llm_quant.quant.ranges import SCALE_DTYPES
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme


class NativeCheckpoint:
    """`inner` seen in float; dequantized weights are `dtype` (None: the type of each linear's scales)."""

    def __init__(
        self, inner: Checkpoint, inference: InferenceConfig, dtype: torch.dtype | None = torch.float32
    ) -> None:
        self.inner, self.inference = inner, inference
        self._dtype = dtype
        self.modules = frozenset(inference.weights.linears)
        self._schemes = {module: self._scheme(module) for module in self.modules}
        self._tensors = self._float_view()

    def _scheme(self, module: str) -> Scheme:
        try:
            scheme = self.inference.scheme_of(module)
        except UsageError as error:
            raise CheckpointError(f"{self.inner.path}/{FILE_NAME}: {module}: {error}") from error
        assert scheme is not None, "modules are those with a scheme"
        return scheme

    def _float_view(self) -> dict[str, TensorInfo]:
        hidden = native.WEIGHT_SUFFIXES + native.INPUT_SUFFIXES
        view: dict[str, TensorInfo] = {}
        for name, info in self.inner.tensors.items():
            module, _, suffix = name.rpartition(".")
            if is_kv_scale(name) or (module in self.inference.weights.tied and suffix in hidden):
                continue
            if module not in self.modules or suffix not in hidden:
                view[name] = info
            elif suffix in ("weight", "weight_packed"):
                out, columns = self._shape(module, info)
                dtype = self._dtype or self._scale_dtype(module)
                weight = f"{module}.weight"
                view[weight] = TensorInfo(weight, dtype, (out, columns), info.file, out * columns * dtype.itemsize)
        missing = [module for module in self.modules if f"{module}.weight" not in view]
        if missing:
            raise CheckpointError(f"{self.inner.path}: {min(missing)} is quantized, but its weight is in no file")
        return view

    def _shape(self, module: str, info: TensorInfo) -> tuple[int, int]:
        if len(info.shape) != 2:
            raise CheckpointError(f"{self.inner.path}: {info.name} has {len(info.shape)} dimensions, expected 2")
        out, columns = info.shape
        if info.name.endswith(".weight"):
            return out, columns
        if self._schemes[module].dtype == "fp4_e2m1":
            return out, 2 * columns
        name = f"{module}.weight_shape"
        if name not in self.inner.tensors or self.inner.tensors[name].shape != (2,):
            raise CheckpointError(f"{self.inner.path}: {name} must hold two numbers, rows and columns")
        out, columns = self.inner.load(name).tolist()
        return int(out), int(columns)

    def _scale_dtype(self, module: str) -> torch.dtype:
        """That of a linear's scales; of scales in 8 bits, the dtype that the config gives the model."""
        scale = self.inner.tensors.get(f"{module}.weight_scale")
        if scale is not None and scale.dtype in SCALE_DTYPES:
            return scale.dtype
        named = getattr(torch, str(self.inner.config.get("torch_dtype")), None)
        return named if named in SCALE_DTYPES else torch.float32

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
        if module not in self.modules:
            return None
        names = [f"{module}.{suffix}" for suffix in native.WEIGHT_SUFFIXES]
        stored = {name: self.inner.load(name) for name in names if name in self.inner.tensors}
        return native.decode(module, stored, self._schemes[module])

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
