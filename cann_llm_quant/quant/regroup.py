"""Smaller groups without a new rounding: a group's scale and zero point are repeated for each of its parts.

scale'[n, j] = scale[n, j * size // group_size]        the weights stay what they are, bit for bit
"""

import torch
from torch import Tensor

from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme


def finer(scheme: Scheme, columns: int, size: int) -> Scheme | None:
    """The scheme with groups of `size` that says the same of a matrix with `columns`; None where none does.

    One scale a row or a matrix is a group as wide as the row. Block formats and tiles keep their groups.
    """
    if scheme.scale_type != "float" or scheme.strategy == "tile" or size <= 0:
        return None
    if scheme.columns_per_scale(columns) % size:
        return None
    return Scheme(scheme.dtype, scheme.symmetric, "group", size)


def regroup(weight: QuantizedTensor, size: int) -> QuantizedTensor:
    """The same matrix in groups of `size`; see `finer`, which must have said that there is such a scheme."""
    out, columns = weight.shape
    scheme = finer(weight.scheme, columns, size)
    assert scheme is not None, "groups cannot be split so"
    assert weight.group_index is None, "scattered groups are not runs that could be split"
    zeros = None if weight.zero_point is None else _repeat(weight.zero_point, out, columns // size)
    return QuantizedTensor(weight.stored, _repeat(weight.scale, out, columns // size), zeros, scheme)


def _repeat(values: Tensor, out: int, groups: int) -> Tensor:
    rows = values.expand(out, -1)
    return torch.repeat_interleave(rows, groups // rows.shape[1], dim=1)
