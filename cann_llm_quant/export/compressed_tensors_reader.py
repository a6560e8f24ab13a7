"""Checkpoints in compressed-tensors layouts that other tools wrote, by their `quantization_config` and their tensors.

The layouts are those of `native.py`; this module adds what only other writers store:

    weight_packed       2-, 4-, 8-bit codes are the same in all versions. Of 3, 5 and 6 bits, versions before 0.18 put
                        32 // bits whole codes into a word; `weight_packed`'s width tells the two apart
    weight_g_idx        int32 [in], each column's group (actorder "group", gone since 0.19); -1 everywhere says nothing
    weight_zero_point   beside symmetric weights too, zeros then; of any integer type where it is not packed
    weight_scale        one number beside packed weights, for one scale a tensor

A linear is quantized where a scale lies beside its weight: float weights that a target's pattern happens to match
(routers, say, which are no `Linear`) stay float.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.export import native
from cann_llm_quant.export.compressed_tensors_config import CompressedTensorsConfig, Group, compressed_tensors_config
from cann_llm_quant.export.compressed_tensors_forms import (
    as_native,
    check_packing,
    check_scale,
    group_indices,
    stored_shape,
)
from cann_llm_quant.export.layout import StoredLinear
from cann_llm_quant.export.native_inputs import decode_inputs
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.ranges import SCALE_DTYPES
from cann_llm_quant.quant.scheme import QuantizedTensor

WEIGHT_SUFFIXES = (*native.WEIGHT_SUFFIXES, "weight_g_idx")
_SCALES = ("weight_scale", "weight_global_scale", "weight_zero_point", "weight_g_idx")


class CompressedTensorsReader:
    """The quantized linears of `checkpoint`; implements `layout.Reader`.

    Raises CheckpointError where config and tensors contradict each other, UnsupportedError for what cannot be read.
    """

    layout: str = "compressed-tensors"

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._where = f"{checkpoint.path}/config.json"
        self._config: CompressedTensorsConfig = compressed_tensors_config(checkpoint.config, self._where)
        self.kv_cache = self._config.kv_cache
        parts = _parts_by_module(checkpoint)
        self.tied: Mapping[str, str] = self._tied(parts)
        self._groups = {module: self._group(module) for module in parts if module not in self.tied}
        self.linears: Mapping[str, StoredLinear] = {
            module: self._linear(module, parts[module]) for module in self._groups
        }

    def _tied(self, parts: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
        """A head with scales and no matrix reads the embedding's, which has to be quantized then."""
        if self._checkpoint.config.get("tie_word_embeddings") is not True:
            return {}
        tables = [module for module in parts if module.endswith("embed_tokens")]
        bare = [m for m in parts if f"{m}.weight" not in parts[m] and f"{m}.weight_packed" not in parts[m]]
        return {module: tables[0] for module in bare if tables}

    def _group(self, module: str) -> Group:
        kind = "Embedding" if module.endswith("embed_tokens") else "Linear"
        group = self._config.group_of(module, kind)
        if group is None:
            raise CheckpointError(
                f"{self._where}: {module} is stored in codes, but no target of config_groups matches it or ignore "
                "does; one of the files is wrong"
            )
        return group

    def _linear(self, module: str, names: tuple[str, ...]) -> StoredLinear:
        group = self._groups[module]
        shape = stored_shape(self._checkpoint, module, group.scheme)
        infos, where = {name: self._checkpoint.tensors[name] for name in names}, str(self._checkpoint.path)
        check_scale(module, infos, group.scheme, shape, where)
        if f"{module}.weight_packed" in names and group.scheme.is_integer:
            check_packing(module, infos, group.scheme, shape, where)
        if group.act_order and f"{module}.weight_g_idx" not in names:
            raise CheckpointError(
                f"{self._checkpoint.path}: {module}: actorder says that columns are assigned to groups one by one, but "
                f"tensor {module}.weight_g_idx is missing; fetch the model again"
            )
        inputs = [
            name for suffix in native.INPUT_SUFFIXES if (name := f"{module}.{suffix}") in self._checkpoint.tensors
        ]
        scattered = f"{module}.weight_g_idx" in names
        return StoredLinear(group.scheme, shape, (*names, *inputs), self._dtype(module), group.activations, scattered)

    def _dtype(self, module: str) -> torch.dtype:
        """That of the scales; of scales in 8 bits, the one that the config gives the model."""
        scale = self._checkpoint.tensors.get(f"{module}.weight_scale")
        if scale is not None and scale.dtype in SCALE_DTYPES:
            return scale.dtype
        config = self._checkpoint.config
        named = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
        return named if named in SCALE_DTYPES else torch.float32

    def quantized(self, module: str) -> QuantizedTensor:
        """A linear in its stored codes. Raises CheckpointError when its tensors are damaged."""
        linear = self.linears[module]
        stored = self._load(module, WEIGHT_SUFFIXES)
        index = stored.pop(f"{module}.weight_g_idx", None)
        with native.read_from(self._checkpoint.path):
            known = as_native(module, stored, linear.scheme, linear.shape, dense=self._config.dense)
            weight = native.decode(module, known, linear.scheme)
            _check_range(module, weight)
            return weight if index is None else replace(weight, group_index=group_indices(module, index, weight))

    def inputs(self, module: str) -> InputQuantizer | None:
        """How a linear's input is quantized. Raises CheckpointError when a stored range cannot be used."""
        scheme = self.linears[module].activations
        return None if scheme is None else decode_inputs(module, scheme, self._load(module, native.INPUT_SUFFIXES))

    def _load(self, module: str, suffixes: tuple[str, ...]) -> dict[str, Tensor]:
        names = {f"{module}.{suffix}" for suffix in suffixes}
        return {name: self._checkpoint.load(name) for name in self.linears[module].tensors if name in names}


def _parts_by_module(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """The tensors of each module that is stored in codes: packed, of a type of codes, or beside a scale."""
    found: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        module, _, suffix = name.rpartition(".")
        if suffix in WEIGHT_SUFFIXES:
            found.setdefault(module, []).append(name)
        elif suffix.endswith("_packed"):
            raise UnsupportedError(f"{checkpoint.path}: {name} holds several matrices in one tensor, which is not read")
    return {module: tuple(names) for module, names in found.items() if _in_codes(checkpoint, module, names)}


def _in_codes(checkpoint: Checkpoint, module: str, names: list[str]) -> bool:
    suffixes = {name.rpartition(".")[2] for name in names}
    if "weight_packed" in suffixes or not suffixes.isdisjoint(_SCALES):
        return True
    dtype = checkpoint.tensors[names[0]].dtype
    return dtype not in (*SCALE_DTYPES, torch.float64)


def _check_range(module: str, weight: QuantizedTensor) -> None:
    """Codes of fewer than 8 bits in whole bytes might lie outside their range; packed ones cannot."""
    scheme = weight.scheme
    if not scheme.is_integer or scheme.bits == 8:
        return
    for what, codes in (("weight", weight.codes), ("weight_zero_point", weight.zero_point)):
        if codes is None or not codes.numel():
            continue
        low, high = (int(n) for n in codes.aminmax())
        if low < scheme.qmin or high > scheme.qmax:
            raise CheckpointError(
                f"{module}: {what} holds codes from {low} to {high}, {scheme.dtype} reaches from {scheme.qmin} to "
                f"{scheme.qmax}; config and tensors do not belong together"
            )
