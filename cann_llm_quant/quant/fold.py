"""The algebra of smooth pairs: what a producer divides, its consumers multiply, and the function stays the
same.

A site's input x is made by a producer (a norm, or another linear's rows); its linears compute x Wᵀ. For a
positive factor s per input channel

    x Wᵀ = (x / s) (W s)ᵀ        so the producer makes x / s and every linear of the site takes W s

and the statistics follow: H = sum of xᵀx becomes D⁻¹ H D⁻¹ with D = diag(s). A norm multiplies by `offset +
gain` (offset 1 for Gemma-like norms, else 0). Under grouped-query attention every row of v feeds several
channels of o, which therefore must share their factor.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def divide_norm_gain(
    gain: Float[Tensor, "channels"], factor: Float[Tensor, "channels"], offset: float
) -> Float[Tensor, "channels"]:
    """The gain of a norm whose output is divided by `factor`: `(offset + gain) / factor - offset`, in float32."""
    return (offset + gain.to(_wide(gain))) / factor.to(_wide(gain)) - offset


def stored_norm_gain(
    gain: Float[Tensor, "channels"], factor: Float[Tensor, "channels"], offset: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "channels"], Float[Tensor, "channels"]]:
    """The divided gain as it is stored in `dtype`, and the factor that it then really has been divided by.

    Folding that second factor into the linears makes the rounding of the gain cost nothing. A channel whose
    gain is 0 on either side keeps the wanted factor.
    """
    stored = divide_norm_gain(gain, factor, offset).to(dtype)
    wide = _wide(gain)
    before, after = offset + gain.to(wide), offset + stored.to(wide)
    kept = (before != 0) & (after != 0)
    return stored, torch.where(kept, before / torch.where(kept, after, 1.0), factor.to(wide))


def divide_rows(
    weight: Float[Tensor, "out in"], bias: Float[Tensor, "out"] | None, factor: Float[Tensor, "out"]
) -> tuple[Float[Tensor, "out in"], Float[Tensor, "out"] | None]:
    """A linear whose output is divided by `factor`, its bias included; at least float32."""
    dtype = _wide(weight)
    s = factor.to(dtype)
    return weight.to(dtype) / s.unsqueeze(1), None if bias is None else bias.to(dtype) / s


def multiply_columns(weight: Float[Tensor, "out in"], factor: Float[Tensor, "in"]) -> Float[Tensor, "out in"]:
    """A linear whose input was divided by `factor`; its bias stays as it is. At least float32."""
    return weight.to(_wide(weight)) * factor.to(_wide(weight))


def rescale_hessian(hessian: Float[Tensor, "in in"], factor: Float[Tensor, "in"]) -> Float[Tensor, "in in"]:
    """The Gram matrix of an input that was divided by `factor`: `D⁻¹ H D⁻¹`."""
    s = factor.to(hessian.dtype)
    return hessian / s.unsqueeze(1) / s


def tie_over_repeats(num_kv_heads: int, repeat: int, head_dim: int) -> Int[Tensor, "in"]:
    """For every input channel of o the row of v that feeds it: channels with the same row share one factor.

    Query heads lie `repeat` to each key/value head, so channel c reads row
    `(c // head_dim // repeat) * head_dim + c % head_dim`.
    """
    rows = torch.arange(num_kv_heads * head_dim).view(num_kv_heads, 1, head_dim)
    return rows.expand(num_kv_heads, repeat, head_dim).reshape(-1)


def spread_rows(factor: Float[Tensor, "in"], tie: Int[Tensor, "in"]) -> Float[Tensor, "rows"]:
    """The factor of every producer row, from the tied factors of the channels that it feeds."""
    rows = torch.ones(int(tie.max()) + 1, dtype=factor.dtype, device=factor.device)
    rows[tie] = factor
    return rows


def _wide(tensor: Tensor) -> torch.dtype:
    """Half types are computed in float32; float64 stays."""
    return torch.promote_types(tensor.dtype, torch.float32)
