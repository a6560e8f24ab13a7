"""A Gram matrix made trustworthy where few tokens were seen.

With fewer tokens than columns H is singular, and a solver that trusts it moves all errors into directions that those
tokens happened not to use: on held-out inputs it then ends worse than plain rounding. So pseudo-observations are
added,

    H' = H + (k / n) (diag(H) + mean(diag(H)) I) / 2,      k = in / 8, n = tokens

a diagonal prior whose weight fades as tokens come in (shrinkage in the sense of Ledoit and Wolf 2004, with a fixed
weight). Measured on correlated Gaussian inputs of 256 columns, held-out relative error of searched grids: 1 token
.0172 without, .0120 with (plain rounding .0194); 32 tokens .0093 / .0096, with AWQ .0064 / .0057; 1024 tokens .0085 /
.0085.

An expert of a mixture has more to go by than a diagonal: the tokens that went to other experts. Each counts with the
probability p that the router gave this expert, and together they stand for as many tokens as they are worth at most

    S = sum p x xᵀ / sum p,      m = min(in, (sum p)² / sum p²),      H' = H + m S

(the fraction is Kish's effective number of unequally weighted tokens). Measured figures are in docs/methods.md.
"""

import torch
from jaxtyping import Float
from torch import Tensor

PSEUDO_TOKENS_PER_COLUMN = 0.125


def shrink_hessian(hessian: Float[Tensor, "in in"], tokens: int) -> Float[Tensor, "in in"]:
    """H' of the module's formula.

    The argument is not changed. `tokens` > 0 is how many rows were summed in `hessian`.
    """
    diagonal = hessian.diagonal()
    weight = PSEUDO_TOKENS_PER_COLUMN * hessian.shape[0] / tokens
    shrunk = hessian.clone()
    shrunk.diagonal().add_((diagonal + diagonal.mean()).mul_(weight / 2))
    return shrunk


def borrowed_hessian(
    rows: Float[Tensor, "rows in"], weights: Float[Tensor, " rows"]
) -> tuple[Float[Tensor, "in in"], int]:
    """`m S` and `m` of the module's second formula, S shrunk for its own want of tokens; `weights` are not negative.

    The number is 0, and so is the matrix, when no weight is positive.
    """
    largest = float(weights.max()) if weights.numel() else 0.0
    if not largest > 0:
        return rows.new_zeros(rows.shape[1], rows.shape[1], dtype=torch.float32), 0
    # Squares of small probabilities would leave float32.
    w = weights.to(torch.float32) / largest
    total = float(w.sum(dtype=torch.float64))
    effective = max(1, round(total**2 / float(w.square().sum(dtype=torch.float64))))
    scaled = rows.to(torch.float32) * w.sqrt().unsqueeze(1)
    shared = shrink_hessian((scaled.T @ scaled).mul_(effective / total), effective)
    count = min(rows.shape[1], effective)
    return shared.mul_(count / effective), count
