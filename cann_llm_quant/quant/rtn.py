"""Round to nearest: choose a grid for every group, then round each weight to it on its own.

`minmax` spans the extremes of the group. `mse` searches the grid with the least squared error; given the
input's Gram matrix it is the error of the outputs, block by block, that is searched (see grid.py).
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.quant.grid import minmax_grid, quantize_codes, search_grid
from cann_llm_quant.quant.ranges import global_scale
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme

Clip = Literal["minmax", "mse"]


def solve(
    w: Float[Tensor, "out in"],
    scheme: Scheme,
    scale_dtype: torch.dtype,
    *,
    clip: Clip = "minmax",
    hessian: Float[Tensor, "in in"] | None = None,
    importance: Float[Tensor, "in"] | None = None,
    amax: float | None = None,
) -> QuantizedTensor:
    """Quantize one matrix; `hessian` and `importance` are for `mse`, `amax` for schemes with one scale for the matrix.

    `amax` is the largest weight of the matrices that a runtime fuses with this one (`grid.shared_amax`). Raises
    UsageError when groups do not fit, NumericError when weights are not finite.
    """
    if clip == "minmax":
        scale, zero_point = minmax_grid(w, scheme, scale_dtype, amax=amax)
    else:
        scale, zero_point = search_grid(w, scheme, scale_dtype, importance=importance, hessian=hessian, amax=amax)
    divisor = global_scale(w, scheme, amax) if scheme.scale_type == "e4m3" else None
    return QuantizedTensor(quantize_codes(w, scale, zero_point, scheme), scale, zero_point, scheme, divisor)
