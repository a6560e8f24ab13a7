"""Older and rarer forms of compressed-tensors' tensors, checked and turned into those that `native.decode` reads.

Packed by whole words (versions before 0.18), n codes of b bits take ceil(n / (32 // b)) words, the first code in the
lowest bits, the rest of a word unused:

    3 bits: 10 codes a word    5 bits: 6    6 bits: 5

against ceil(n * b / 32) words of a dense stream. The two agree for 2, 4 and 8 bits.
"""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Int8, Int32
from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint, TensorInfo
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.quant.pack import pack_int32, packed_length
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def stored_shape(checkpoint: Checkpoint, module: str, scheme: Scheme) -> tuple[int, int]:
    """Rows and columns of a linear, from headers and `weight_shape`.

    Raises CheckpointError when its matrix is missing or not stored as the scheme says, UnsupportedError for stacks.
    """
    info = _matrix(checkpoint, module, scheme)
    out, columns = info.shape
    if info.name.endswith(".weight"):
        return out, columns
    if not scheme.is_integer:
        return out, 2 * columns
    tensors, name = checkpoint.tensors, f"{module}.weight_shape"
    if name not in tensors or tensors[name].shape != (2,) or tensors[name].dtype not in _INTEGERS:
        raise CheckpointError(f"{checkpoint.path}: {name} must hold two numbers, rows and columns")
    rows, columns = (int(n) for n in checkpoint.load(name).tolist())
    if rows != out or columns < 1:
        raise CheckpointError(f"{checkpoint.path}: {name} says {rows} x {columns}, but {info.name} has {out} rows")
    return rows, columns


def _matrix(checkpoint: Checkpoint, module: str, scheme: Scheme) -> TensorInfo:
    tensors = checkpoint.tensors
    info = tensors.get(f"{module}.weight_packed", tensors.get(f"{module}.weight"))
    if info is None:
        raise CheckpointError(f"{checkpoint.path}: {module} has a scale, but its weight is in no file")
    if len(info.shape) == 3:
        raise UnsupportedError(
            f"{checkpoint.path}: {info.name} holds several matrices in one tensor, which is not read"
        )
    packed = info.name.endswith("_packed")
    code = torch.int8 if scheme.is_integer else torch.float8_e4m3fn
    expected = {True: torch.int32 if scheme.is_integer else torch.uint8, False: code}[packed]
    wrong_form = not scheme.is_integer and packed != (scheme.dtype == "fp4_e2m1")
    if len(info.shape) != 2 or info.dtype != expected or wrong_form:
        raise CheckpointError(
            f"{checkpoint.path}: {info.name} is {_kind(info)}, which is no matrix in {scheme.dtype} as config.json says"
        )
    return info


def check_scale(
    module: str, infos: Mapping[str, TensorInfo], scheme: Scheme, shape: tuple[int, int], where: str
) -> None:
    """CheckpointError where scales are missing or do not fit the scheme."""
    name = f"{module}.weight_scale"
    if name not in infos:
        raise CheckpointError(
            f"{where}: tensor {name} is missing; {module} is stored in codes and cannot be read without"
        )
    if shape[1] % (scheme.group_size or 1):
        raise CheckpointError(
            f"{where}: {module} has {shape[1]} columns, which groups of {scheme.group_size} do not fit"
        )
    scale, expected = infos[name], scheme.scale_shape(*shape)
    one_number = math.prod(scale.shape) == 1 and scheme.strategy == "tensor"
    if scale.shape != expected and not one_number:
        raise CheckpointError(
            f"{where}: {name} is {_kind(scale)}, expected {list(expected)}: {scheme.label()} of {list(shape)} weights"
        )


def words_of(count: int, bits: int) -> int:
    """Words that hold `count` codes when none runs on over the end of one."""
    return -(-count // (32 // bits))


def check_packing(
    module: str, infos: Mapping[str, TensorInfo], scheme: Scheme, shape: tuple[int, int], where: str
) -> None:
    """CheckpointError where packed codes or zero points do not have the shape that the scheme asks for (C18)."""
    out, columns = shape
    packed = infos[f"{module}.weight_packed"]
    widths = {packed_length(columns, scheme.bits), words_of(columns, scheme.bits)}
    if packed.shape[1] not in widths or packed.dtype != torch.int32:
        raise CheckpointError(
            f"{where}: {packed.name} is {_kind(packed)}, expected int32 {[out, min(widths)]}: {columns} columns of "
            f"{scheme.bits} bits"
        )
    if scheme.symmetric or scheme.strategy == "tensor":
        return
    name = f"{module}.weight_zero_point"
    if name not in infos:
        raise CheckpointError(
            f"{where}: tensor {name} is missing; the weights are asymmetric and cannot be read without"
        )
    groups = scheme.scale_shape(out, columns)[1]
    rows = {packed_length(out, scheme.bits), words_of(out, scheme.bits)}
    zeros = infos[name]
    if zeros.dtype != torch.int32 or zeros.shape not in {(count, groups) for count in rows}:
        raise CheckpointError(
            f"{where}: {name} is {_kind(zeros)}, expected int32 {[min(rows), groups]}: one zero point for each of "
            f"{out} rows and {groups} groups, packed along the rows{_misspelling(zeros, out, groups, scheme.bits)}"
        )


def _misspelling(zeros: TensorInfo, out: int, groups: int, bits: int) -> str:
    """What a faulty writer did, where it shows."""
    if zeros.shape == (out, groups):
        return "; these are not packed"
    return "; these are packed along the groups" if zeros.shape == (out, packed_length(groups, bits)) else ""


def _kind(info: TensorInfo) -> str:
    return f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"


def as_native(
    module: str, stored: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int], *, dense: bool | None
) -> dict[str, Tensor]:
    """A linear's tensors as `native.decode` wants them.

    `dense` is what the writer's version says of 3-, 5- and 6-bit codes, asked only where the width does not tell.
    Raises CheckpointError for zero points other than 0 beside symmetric weights.
    """
    tensors = {name.rpartition(".")[2]: tensor for name, tensor in stored.items()}
    scale, zeros = tensors.get("weight_scale"), tensors.get("weight_zero_point")
    if zeros is not None and scheme.symmetric:
        if bool(zeros.to(torch.float32).any()):
            raise CheckpointError(
                f"{module}: weight_zero_point is not 0, but the config says that weights are symmetric"
            )
        del tensors["weight_zero_point"]
    elif zeros is not None and "weight_packed" not in tensors and zeros.dtype in _INTEGERS:
        tensors["weight_zero_point"] = _as_int8(module, zeros)
    if scale is not None and scale.dtype == torch.float8_e8m0fnu:
        tensors["weight_scale"] = scale.view(torch.uint8)
    if "weight_packed" in tensors and scheme.is_integer:
        tensors |= _packed_as_native(tensors, scheme, shape, dense)
    return {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}


def _packed_as_native(
    tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int], dense: bool | None
) -> dict[str, Tensor]:
    (out, columns), bits = shape, scheme.bits
    changed = {"weight_shape": torch.tensor(shape, dtype=torch.int64)}
    packed, scale, zeros = (tensors.get(f"weight_{part}") for part in ("packed", "scale", "zero_point"))
    if scheme.strategy == "tensor" and scale is not None and scale.numel() == 1:
        changed["weight_scale"] = scale.reshape(1, 1).expand(out, 1)
        if zeros is not None and zeros.numel() == 1 and not scheme.symmetric:
            changed["weight_zero_point"] = pack_int32(zeros.reshape(1, 1).expand(out, 1).to(torch.int8), bits, dim=0)
    if packed is None or not _in_whole_words(packed.shape[1], columns, bits, dense):
        return changed
    changed["weight_packed"] = pack_int32(unpack_words(packed, bits, columns), bits)
    if zeros is not None and not scheme.symmetric and scheme.strategy != "tensor":
        changed["weight_zero_point"] = pack_int32(unpack_words(zeros.T, bits, out), bits).T.contiguous()
    return changed


def _in_whole_words(width: int, columns: int, bits: int, dense: bool | None) -> bool:
    if 32 % bits == 0:
        return False
    if packed_length(columns, bits) == words_of(columns, bits):
        return dense is False
    return width == words_of(columns, bits)


def unpack_words(words: Int32[Tensor, "rows words"], bits: int, count: int) -> Int8[Tensor, "rows count"]:
    """Signed codes of rows packed by whole words."""
    codes = torch.empty(words.shape[0], words.shape[1], 32 // bits, dtype=torch.int8)
    for place in range(32 // bits):
        # the shift copies the sign bit in from above; the mask takes it away again
        codes[..., place] = ((words >> (place * bits)) & ((1 << bits) - 1)) - (1 << (bits - 1))
    return codes.flatten(1)[:, :count].contiguous()


def _as_int8(module: str, zeros: Tensor) -> Int8[Tensor, "..."]:
    if zeros.numel() and (int(zeros.min()) < -128 or int(zeros.max()) > 127):
        raise CheckpointError(
            f"{module}: weight_zero_point holds numbers from {int(zeros.min())} to {int(zeros.max())}; int8 is expected"
        )
    return zeros.to(torch.int8)


def group_indices(module: str, index: Tensor, weight: QuantizedTensor) -> Int32[Tensor, "in"] | None:
    """Each column's group; None where nothing was assigned.

    Raises CheckpointError for another shape or a group that does not exist.
    """
    columns, groups = weight.shape[1], weight.scale.shape[1]
    if index.shape != (columns,) or index.dtype not in _INTEGERS:
        raise CheckpointError(
            f"{module}: weight_g_idx is {index.dtype} {list(index.shape)}, expected int32 {[columns]}"
        )
    low, high = (int(n) for n in index.aminmax())
    if low == high == -1:
        return None
    if low < 0 or high >= groups:
        raise CheckpointError(f"{module}: weight_g_idx names groups from {low} to {high}, the scales have {groups}")
    return index.to(torch.int32)
