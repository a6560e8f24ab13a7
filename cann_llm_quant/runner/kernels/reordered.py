"""A linear whose groups are scattered over the columns (GPTQ's act-order): columns are put in order of their groups
once, and the input is gathered in that order before each product.

    y = x[:, order] @ w[:, order]ᵀ        order = stable argsort of the columns' groups
"""

from dataclasses import replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from cann_llm_quant.models.decoder import LinearOp
from cann_llm_quant.quant.scheme import QuantizedTensor


def in_group_order(weight: QuantizedTensor) -> tuple[QuantizedTensor, Int64[Tensor, " in"]] | None:
    """The matrix with its groups as runs of neighbours, and the order of its columns.

    None where the groups are not all of one size, so that no order makes them runs of `group_size`.
    """
    assert weight.group_index is not None, "groups are runs of neighbours already"
    order = torch.argsort(weight.group_index, stable=True)
    groups = weight.scale.shape[1]
    counts = torch.bincount(weight.group_index, minlength=groups)
    if weight.shape[1] % groups or not bool((counts == weight.shape[1] // groups).all()):
        return None
    return replace(weight, stored=weight.codes.index_select(1, order), group_index=None), order


class ReorderedLinear:
    """`product` behind a gathering of its input's columns in `order`."""

    def __init__(self, product: LinearOp, order: Int64[Tensor, " in"]) -> None:
        self.product, self.order = product, order

    def __call__(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """The product of the reordered input."""
        return self.product(x.index_select(-1, self.order))
