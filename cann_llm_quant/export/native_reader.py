"""What `quantize` wrote, read by its `inference_config.json`: the layouts of `native.py`, and inputs as
`native_inputs.py` stores them.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.checkpoint.base import Checkpoint, TensorInfo
from cann_llm_quant.errors import CheckpointError, UsageError
from cann_llm_quant.export import native
from cann_llm_quant.export.inference_config import FILE_NAME, InferenceConfig, load_inference_config
from cann_llm_quant.export.kv_section import KvCache
from cann_llm_quant.export.layout import StoredLinear
from cann_llm_quant.export.native_inputs import decode_inputs
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.ranges import SCALE_DTYPES
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme
from cann_llm_quant.shown import shown_name


class NativeReader:
    """The linears that `inference` lists, in the files of `checkpoint`; implements `layout.Reader`.

    Raises CheckpointError when a linear's tensors are missing or its scheme contradicts itself.
    """

    layout: str = "native"

    def __init__(self, checkpoint: Checkpoint, inference: InferenceConfig) -> None:
        self._checkpoint, self.inference = checkpoint, inference
        # of what `quantize` chose itself scales are positive; those of other tools' models have either sign
        self._converted = "converted_from" in inference.provenance.recipe
        self.tied: Mapping[str, str] = inference.weights.tied
        self.kv_cache: KvCache = inference.kv_cache
        self.linears: Mapping[str, StoredLinear] = {
            module: self._linear(module) for module in inference.weights.linears
        }

    def _linear(self, module: str) -> StoredLinear:
        try:
            scheme = self.inference.scheme_of(module)
            activations = self.inference.activations_of(module)
        except UsageError as error:
            raise CheckpointError(f"{self._checkpoint.path}/{FILE_NAME}: {module}: {error}") from error
        assert scheme is not None, "modules are those with a scheme"
        suffixes = native.WEIGHT_SUFFIXES + native.INPUT_SUFFIXES
        names = tuple(f"{module}.{suffix}" for suffix in suffixes if f"{module}.{suffix}" in self._checkpoint.tensors)
        return StoredLinear(scheme, self._shape(module, scheme), names, self._scale_dtype(module), activations)

    def _shape(self, module: str, scheme: Scheme) -> tuple[int, int]:
        stored = self._checkpoint.tensors
        info = stored.get(f"{module}.weight_packed", stored.get(f"{module}.weight"))
        if info is None:
            raise CheckpointError(
                f"{self._checkpoint.path}: {shown_name(module)} is quantized, but its weight is in no file"
            )
        out, columns = self._two(info)
        if info.name.endswith(".weight"):
            return out, columns
        if scheme.dtype == "fp4_e2m1":
            return out, 2 * columns
        name = f"{module}.weight_shape"
        if name not in stored or stored[name].shape != (2,) or stored[name].dtype.is_floating_point:
            raise CheckpointError(f"{self._checkpoint.path}: {name} must hold two numbers, rows and columns")
        out, columns = self._checkpoint.load(name).tolist()
        return int(out), int(columns)

    def _two(self, info: TensorInfo) -> tuple[int, int]:
        if len(info.shape) != 2:
            raise CheckpointError(f"{self._checkpoint.path}: {info.name} has {len(info.shape)} dimensions, expected 2")
        return info.shape[0], info.shape[1]

    def _scale_dtype(self, module: str) -> torch.dtype:
        """That of a linear's scales; of scales in 8 bits, the dtype that the config gives the model."""
        scale = self._checkpoint.tensors.get(f"{module}.weight_scale")
        if scale is not None and scale.dtype in SCALE_DTYPES:
            return scale.dtype
        named = getattr(torch, str(self._checkpoint.config.get("torch_dtype")), None)
        return named if named in SCALE_DTYPES else torch.float32

    def quantized(self, module: str) -> QuantizedTensor:
        """A linear in its stored codes. Raises CheckpointError for damaged tensors, naming them and the folder."""
        linear = self.linears[module]
        stored = {name: self._checkpoint.load(name) for name in linear.tensors if not _of_input(name)}
        with native.read_from(self._checkpoint.path):
            weight = native.decode(module, stored, linear.scheme)
            if not self._converted and weight.scale.numel() and bool(weight.scale.amin() < 0):
                raise CheckpointError(f"{module}.weight_scale is negative in places; the file is damaged")
        return weight

    def inputs(self, module: str) -> InputQuantizer | None:
        """How a linear's input is quantized. Raises CheckpointError as `decode_inputs` does."""
        linear = self.linears[module]
        if linear.activations is None:
            return None
        stored = {name: self._checkpoint.load(name) for name in linear.tensors if _of_input(name)}
        return decode_inputs(module, linear.activations, stored)


def _of_input(name: str) -> bool:
    return name.rpartition(".")[2] in native.INPUT_SUFFIXES


def is_native(path: Path) -> bool:
    """Whether the folder was written by this tool's `quantize`."""
    return (path / "inference_config.json").is_file()


def open_native(path: Path, dtype: torch.dtype | None = torch.float32) -> PackedCheckpoint[NativeReader]:
    """Open a directory that `quantize` wrote.

    Raises CheckpointError when files are missing or contradict each other.
    """
    inference = load_inference_config(path)
    inner = open_checkpoint(str(path), accept_quantized=True)
    return PackedCheckpoint(inner, NativeReader(inner, inference), dtype)
