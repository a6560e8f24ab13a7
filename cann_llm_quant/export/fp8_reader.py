"""FP8 checkpoints as DeepSeek, Qwen3 and others publish them, and the older ones of vLLM and FBGEMM.

    <module>.weight             float8_e4m3fn [out, in]
    <module>.weight_scale_inv   float [ceil(out/128), ceil(in/128)]   w[i, j] = weight[i, j] * scale[i // 128, j // 128]
      or <module>.scale         (DeepSeek's own inference files)      despite its name it is multiplied by
    <module>.weight_scale       float [] or [1] for the matrix, [out] or [out, 1] for its rows, or as above
    <module>.input_scale        float [] or [1], `activation_scheme` "static"

`quant_method` is "fp8" or "fbgemm_fp8". Tiles at the right and lower edge are smaller than 128. A linear is quantized
where its weight is stored in FP8, whatever lists of exceptions say. Inputs are quantized as `activation_scheme` says:
static, one range; dynamic, one range a token, or for 128 columns of a token where weights have tiles. Inputs whose
columns 128 does not divide stay float, as does the upper bound (`activation_scale_ub`) that FBGEMM clips at unread.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint, TensorInfo
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.export import native
from cann_llm_quant.export.kv_section import KvCache
from cann_llm_quant.export.layout import StoredLinear
from cann_llm_quant.export.native_inputs import decode_inputs
from cann_llm_quant.export.weight_only import finite
from cann_llm_quant.models.config_fields import ConfigFields
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.ranges import SCALE_DTYPES
from cann_llm_quant.quant.scheme import TILE, ActivationScheme, QuantizedTensor, Scheme, Strategy
from cann_llm_quant.shown import shown

_TILE_SCALES = ("weight_scale_inv", "scale")
_SCALES = (*_TILE_SCALES, "weight_scale")
_STORED_SCALES = (*SCALE_DTYPES, torch.float8_e8m0fnu)
_OTHER_FP8 = (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class Fp8Reader:
    """The FP8 linears of `checkpoint`; implements `layout.Reader`.

    Raises CheckpointError for a weight without a scale and for scales that do not fit, UnsupportedError for other
    tiles than 128 x 128 and other kinds of FP8.
    """

    layout: str = "fp8"

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._fields = ConfigFields(checkpoint.config, f"{checkpoint.path}/config.json")
        section = self._fields.section("quantization_config")
        if section is None:
            raise CheckpointError(f"{self._fields.where} has no quantization_config; fetch the file again")
        _check_tiles(section)
        self._static = _is_static(section)
        self.tied: Mapping[str, str] = {}
        self.kv_cache = KvCache()
        weights = [info for info in checkpoint.tensors.values() if _is_fp8_weight(info, str(checkpoint.path))]
        self.linears: Mapping[str, StoredLinear] = {
            info.name.removesuffix(".weight"): self._linear(info) for info in weights
        }

    def _linear(self, weight: TensorInfo) -> StoredLinear:
        if len(weight.shape) != 2:
            raise UnsupportedError(
                f"{self._checkpoint.path}: {weight.name} has {len(weight.shape)} dimensions; stacks are not read"
            )
        module = weight.name.removesuffix(".weight")
        scale = self._scale(module)
        shape = (weight.shape[0], weight.shape[1])
        scheme = _scheme(scale, shape, str(self._checkpoint.path))
        names = [weight.name, scale.name]
        static = f"{module}.input_scale"
        if static in self._checkpoint.tensors:
            names.append(static)
        return StoredLinear(scheme, shape, tuple(names), self._dtype(), self._activations(module, scheme, shape[1]))

    def _scale(self, module: str) -> TensorInfo:
        tensors = self._checkpoint.tensors
        found = [tensors[name] for suffix in _SCALES if (name := f"{module}.{suffix}") in tensors]
        if not found:
            raise CheckpointError(
                f"{self._checkpoint.path}: tensor {module}.weight_scale_inv is missing (and no weight_scale is there); "
                f"{module}.weight is stored in FP8 and means nothing without; fetch the model again"
            )
        if len(found) > 1:
            raise CheckpointError(
                f"{self._checkpoint.path}: {module}.weight has two scales, {found[0].name} and {found[1].name}; one of "
                "them is stale"
            )
        if found[0].dtype not in _STORED_SCALES:
            raise CheckpointError(
                f"{self._checkpoint.path}: {found[0].name} is {found[0].dtype}, expected a float type"
            )
        return found[0]

    def _activations(self, module: str, scheme: Scheme, columns: int) -> ActivationScheme | None:
        if self._static:
            if f"{module}.input_scale" not in self._checkpoint.tensors:
                raise CheckpointError(
                    f"{self._checkpoint.path}: tensor {module}.input_scale is missing; activation_scheme is static"
                )
            return ActivationScheme("fp8_e4m3", True, False, "tensor")
        if scheme.strategy != "tile":
            return ActivationScheme("fp8_e4m3")
        return ActivationScheme("fp8_e4m3", True, True, "group", TILE) if columns % TILE == 0 else None

    def _dtype(self) -> torch.dtype:
        config = self._checkpoint.config
        named = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
        return named if named in SCALE_DTYPES else torch.bfloat16

    def quantized(self, module: str) -> QuantizedTensor:
        """A linear in its stored codes. Raises CheckpointError when codes or scales hold NaN or infinity."""
        linear = self.linears[module]
        weight, scale = (self._checkpoint.load(name) for name in linear.tensors[:2])
        with native.read_from(self._checkpoint.path):
            stored = {f"{module}.weight": weight, f"{module}.weight_scale": _as_native(linear, scale)}
            return native.decode(module, stored, linear.scheme)

    def inputs(self, module: str) -> InputQuantizer | None:
        """How the input of one linear is quantized. Raises CheckpointError when a stored range cannot be used."""
        linear = self.linears[module]
        if linear.activations is None:
            return None
        stored = {name: self._checkpoint.load(name) for name in linear.tensors[2:]}
        return decode_inputs(module, linear.activations, stored)


def _check_tiles(section: ConfigFields) -> None:
    sizes = section.items("weight_block_size")
    if sizes and sizes != [TILE, TILE]:
        raise UnsupportedError(
            f"{section.where}: weight_block_size {shown(sizes)} is not supported; this version reads 128 x 128"
        )
    if section.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedError(
            f"{section.where}: fmt {shown(section.text('fmt'))} is not supported; this version reads e4m3"
        )


def _is_static(section: ConfigFields) -> bool:
    scheme = section.text("activation_scheme", "dynamic")
    if scheme not in ("static", "dynamic"):
        raise CheckpointError(f"{section.where}: activation_scheme must be static or dynamic, found {shown(scheme)}")
    return scheme == "static"


def _is_fp8_weight(info: TensorInfo, where: str) -> bool:
    if not info.name.endswith(".weight"):
        return False
    if info.dtype in _OTHER_FP8:
        kind = str(info.dtype).removeprefix("torch.")
        raise UnsupportedError(f"{where}: {info.name} is stored as {kind}; this version reads float8_e4m3fn")
    return info.dtype == torch.float8_e4m3fn


def _scheme(scale: TensorInfo, shape: tuple[int, int], where: str) -> Scheme:
    """The scheme whose scales have this shape."""
    suffix, strategy = scale.name.rpartition(".")[2], _strategy(scale.shape, shape)
    tiled = scale.shape == Scheme("fp8_e4m3", True, "tile", None).scale_shape(*shape)
    if tiled and (suffix in _TILE_SCALES or strategy is None):
        strategy = "tile"
    if strategy is None or (suffix in _TILE_SCALES and strategy != "tile"):
        tiles = list(Scheme("fp8_e4m3", True, "tile", None).scale_shape(*shape))
        expected = str(tiles) if suffix in _TILE_SCALES else f"one number, {[shape[0], 1]} or {tiles}"
        raise CheckpointError(
            f"{where}: {scale.name} has shape {list(scale.shape)}, expected {expected} for a weight of {list(shape)}"
        )
    return Scheme("fp8_e4m3", True, strategy, None)


def _strategy(scale: tuple[int, ...], shape: tuple[int, int]) -> Strategy | None:
    if scale in ((), (1,), (1, 1)):
        return "tensor"
    return "channel" if scale in ((shape[0],), (shape[0], 1)) else None


def _as_native(linear: StoredLinear, scale: Tensor) -> Tensor:
    """Scales in float32 and two dimensions, finite. Raises CheckpointError."""
    values = scale.to(torch.float32) if scale.dtype == torch.float8_e8m0fnu else scale
    return finite(linear.tensors[1], values).reshape(linear.scheme.scale_shape(*linear.shape))
