"""Sums of codes along the inputs, which some AscendV1 types store."""

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from cann_llm_quant.quant.nibbles import run_sums
from cann_llm_quant.quant.scheme import QuantizedTensor

# Rows are widened to float32 a few at a time: a copy of the whole matrix costs ten times as much, in page faults.
_BLOCK = 1 << 18


def code_sums(codes: Int8[Tensor, "out in"], run: int) -> Float[Tensor, "out runs"]:
    """The sum of every `run` neighbouring codes of a row, exact up to 2^17 of them."""
    rows = max(1, _BLOCK // codes.shape[1])
    blocks = (codes[start : start + rows].to(torch.float32) for start in range(0, len(codes), rows))
    return torch.cat([block.view(len(block), -1, run).sum(-1) for block in blocks])


def matrix_sums(weight: QuantizedTensor, run: int) -> Float[Tensor, "out runs"]:
    """`code_sums` of a matrix of integers, added up in packed form where its codes of 4 bits allow it."""
    if weight.scheme.bits != 4 or run % 8:
        return code_sums(weight.codes, run)
    stream = weight.stream
    fields = torch.cat([run_sums(stream.packed[rows], run) for rows in stream.blocks()])
    return (fields - 8 * run).to(torch.float32)
