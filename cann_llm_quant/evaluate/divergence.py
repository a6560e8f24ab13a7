"""How far a candidate's next-token distributions lie from a reference's, position by position.

    KL(p || q) = sum_v p_v (log p_v - log q_v)   in nats, p the reference, q the candidate

and whether both put the same token first. log_softmax in float32 by row chunks, sums over the vocabulary in
float64.
"""

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from cann_llm_quant.errors import UsageError
from cann_llm_quant.evaluate.perplexity import row_chunks


def divergence(
    reference: Float[Tensor, "seq reference_vocab"], candidate: Float[Tensor, "seq vocab"], first: int = 0
) -> tuple[Float64[Tensor, " compared"], Bool[Tensor, " compared"]]:
    """KL in nats and top-1 agreement at the positions from `first` on.

    Raises UsageError when the vocabularies differ in size.
    """
    if reference.shape[1] != candidate.shape[1]:
        raise UsageError(
            f"the reference predicts {reference.shape[1]} tokens and the candidate {candidate.shape[1]}; "
            "KL needs two models with one vocabulary"
        )
    compared = len(candidate) - first
    kl = torch.empty(compared, dtype=torch.float64)
    same = torch.empty(compared, dtype=torch.bool)
    for rows in row_chunks(compared, candidate.shape[1]):
        log_q = candidate[first:][rows].to(torch.float32).log_softmax(-1)
        log_p = reference[first:][rows].to(log_q.device, torch.float32).log_softmax(-1)
        same[rows] = (log_p.argmax(-1) == log_q.argmax(-1)).cpu()
        kl[rows] = log_p.exp().mul_(log_q.neg_().add_(log_p)).sum(-1, dtype=torch.float64).cpu()
    return kl, same
