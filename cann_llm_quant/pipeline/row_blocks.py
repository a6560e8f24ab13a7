"""Matrices of one row a vocabulary entry, a block of rows at a time.

Rows do not depend on one another, and a large vocabulary in float32 is many layers' worth of memory.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.pipeline.prepare import Job
from cann_llm_quant.pipeline.request import BLOCK_ELEMENTS
from cann_llm_quant.quant.grid import choose_scale_dtype
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme


def row_blocks(job: Job, source: Float[Tensor, "rows columns"]) -> Iterator[Float[Tensor, "block columns"]]:
    """Rows of a matrix in float32 on the device, at most `BLOCK_ELEMENTS` numbers at a time."""
    step = max(1, BLOCK_ELEMENTS // source.shape[1])
    for begin in range(0, source.shape[0], step):
        yield source[begin : begin + step].to(job.device, torch.float32)


def blocks_scale_dtype(job: Job, source: Tensor, scheme: Scheme) -> torch.dtype:
    """The type that the scales of all blocks fit in."""
    found = {choose_scale_dtype(block, scheme, source.dtype) for block in row_blocks(job, source)}
    return found.pop() if len(found) == 1 else torch.float32


def joined(parts: list[QuantizedTensor]) -> QuantizedTensor:
    """One matrix of the parts' rows, in order."""
    zeros = [part.zero_point for part in parts if part.zero_point is not None]
    return QuantizedTensor(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(zeros) if zeros else None,
        parts[0].scheme,
    )


def on_host(weight: QuantizedTensor) -> QuantizedTensor:
    """The same in the CPU's memory."""
    zeros = weight.zero_point
    return QuantizedTensor(
        weight.codes.cpu(), weight.scale.cpu(), None if zeros is None else zeros.cpu(), weight.scheme
    )
