"""Mixture of experts: each token goes to its `top_k` experts and their outputs are summed with the router's weights.

    p = softmax(router logits) in float32;  (w, e) = top_k(p);  w /= sum(w) if normalized
    y[t] = sum_k w[t, k] * expert_{e[t, k]}(x[t])

(Shazeer et al., 1701.06538; Mixtral, 2401.04088.) Experts run in ascending order and each sees its tokens in ascending
order, so that a sum never depends on scheduling; an expert without tokens does not run.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cann_llm_quant.models.arch import Moe


def route(
    logits: Float[Tensor, "tokens experts"], moe: Moe
) -> tuple[Float[Tensor, "tokens top_k"], Int[Tensor, "tokens top_k"]]:
    """Float32 weights and indices of the experts of each token, the heaviest first."""
    weights, experts = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(moe.top_k, dim=-1)
    if moe.normalize_top_k:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts


def mix_experts(
    x: Float[Tensor, "tokens hidden"],
    weights: Float[Tensor, "tokens top_k"],
    experts: Int[Tensor, "tokens top_k"],
    run: Callable[[int, Float[Tensor, "routed hidden"]], Float[Tensor, "routed hidden"]],
) -> Float[Tensor, "tokens hidden"]:
    """Weighted sum of `run(expert, its tokens)`, accumulated in the dtype of `x`."""
    mixed = torch.zeros_like(x)
    for expert in torch.unique(experts).tolist():
        tokens, choice = torch.where(experts == expert)
        output = run(expert, x[tokens])
        # a token picks an expert once, so no two rows of this update collide
        mixed[tokens] += (output * weights[tokens, choice, None]).to(x.dtype)
    return mixed
