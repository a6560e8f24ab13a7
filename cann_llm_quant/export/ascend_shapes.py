"""Whether the stored tensors of a linear have the shapes and types of its AscendV1 type, by their headers alone."""

from collections.abc import Mapping

import torch

from cann_llm_quant.checkpoint.base import TensorInfo
from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.export.ascend_types import ROW_SLICES, AscendType

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# msModelSlim wrote offsets as integers once
_OFFSETS = (*_FLOATS, torch.int8, torch.int32, torch.int64)
_DTYPES: Mapping[str, tuple[torch.dtype, ...]] = {
    "weight": (torch.int8,),
    "weight_scale": _FLOATS,
    "weight_offset": _OFFSETS,
    "weight_scale_second": _FLOATS,
    "weight_offset_second": _OFFSETS,
    "scale_bias": _FLOATS,
    "input_scale": _FLOATS,
    "input_offset": _OFFSETS,
    "deq_scale": (torch.float32, torch.int64),
    "quant_bias": (torch.int32,),
}
_NEEDED: Mapping[AscendType, tuple[str, ...]] = {
    "W8A8": ("weight", "input_scale", "input_offset", "deq_scale", "quant_bias"),
    "W8A8_DYNAMIC": ("weight", "weight_scale"),
    "W8A16": ("weight", "weight_scale"),
    "W4A8_DYNAMIC": ("weight", "weight_scale"),
    "W4A16": ("weight", "weight_scale"),
}


def check_tensors(where: str, module: str, kind: AscendType, infos: Mapping[str, TensorInfo], *, packed: bool) -> None:
    """Raise CheckpointError when a tensor, by suffix, is missing (C25), of another type or of another shape."""
    for suffix in _NEEDED[kind]:
        if suffix not in infos:
            raise CheckpointError(f"{where}: tensor {module}.{suffix} is missing; {kind} linears need it")
    for suffix, info in infos.items():
        if info.dtype not in _DTYPES[suffix]:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES[suffix])
            raise CheckpointError(f"{where}: {info.name} is {str(info.dtype).removeprefix('torch.')}, expected {names}")
        if 0 in info.shape:
            raise CheckpointError(f"{where}: {info.name} is empty, {list(info.shape)}; the file is damaged")
    if len(infos["weight"].shape) != 2:
        raise CheckpointError(f"{where}: {module}.weight is {list(infos['weight'].shape)}, expected a matrix")
    (out, columns), groups = matrix_shape(kind, infos, packed=packed)
    if columns % groups:
        raise CheckpointError(f"{where}: {module} has {groups} scales a row for {columns} columns")
    _check_beside(where, kind, infos, out, groups)


def matrix_shape(kind: AscendType, infos: Mapping[str, TensorInfo], *, packed: bool) -> tuple[tuple[int, int], int]:
    """Rows and columns of the matrix, and how many scales a row has."""
    rows, columns = infos["weight"].shape
    scales = infos.get("weight_scale_second", infos.get("weight_scale"))
    groups = scales.shape[1] if scales is not None and len(scales.shape) == 2 else 1
    if not packed or kind not in ("W4A8_DYNAMIC", "W4A16"):
        return (rows, columns), groups
    along_columns = kind == "W4A16" and infos["weight_scale"].shape[0] == rows
    return ((rows, 2 * columns) if along_columns else (2 * rows, columns)), groups


def _check_beside(where: str, kind: AscendType, infos: Mapping[str, TensorInfo], out: int, groups: int) -> None:
    """The shapes of everything but the weight."""
    vector = ((out,), (out, 1))
    first = ((out, 1),) if kind == "W4A8_DYNAMIC" else ((out, groups),)
    wanted: Mapping[str, tuple[tuple[int, ...], ...]] = {
        "weight_scale": first,
        "weight_offset": first,
        "weight_scale_second": ((out, groups),),
        "weight_offset_second": ((out, groups),),
        "scale_bias": ((out,), (out, 1), (out, ROW_SLICES)),
        "input_scale": ((), (1,)),
        "input_offset": ((), (1,)),
        "deq_scale": vector,
        "quant_bias": vector,
    }
    for suffix, info in infos.items():
        if suffix != "weight" and info.shape not in wanted[suffix]:
            expected = list(wanted[suffix][-1])
            raise CheckpointError(f"{where}: {info.name} is {list(info.shape)}, expected {expected}")
