"""What a linear should compute so that its output is the float model's, although its input has already drifted.

Earlier layers are quantized, so a linear reads y where the float model reads x, and what it writes is added to a
stream that has drifted as well. The matrix T whose outputs come closest, in the least squares sense over the
calibration tokens, to W y + e, with e what is then still missing, is

    T = W + M (H + ridge)⁻¹      H = sum y yᵀ,  M = sum e yᵀ;   e = W (x - y) where nothing but the input has drifted

and rounding T instead of W lets each layer undo what those before it did. (Asymmetric calibration: GPTAQ, Li et al.
2025, arXiv:2504.02692; Qronos, Zhang et al. 2025, arXiv:2505.11695. That o and down also make up for the stream they
are added to is ours.) The correction is fitted to few tokens and overfits if taken whole, hence `strength` < 1 and a
ridge of a share of H's mean diagonal.
"""

import torch
from jaxtyping import Float
from torch import Tensor

STRENGTH = 0.6
RIDGE = 0.1


def drift_target(
    w: Float[Tensor, "out in"],
    hessian: Float[Tensor, "in in"],
    missing: Float[Tensor, "out in"],
    *,
    strength: float = STRENGTH,
    ridge: float = RIDGE,
) -> Float[Tensor, "out in"]:
    """T of the module's formula in float32; `missing` is M.

    `w` itself where H is zero or the system cannot be solved.
    """
    w, h = w.to(torch.float32), hessian.to(torch.float32)
    mean = float(h.diagonal().mean(dtype=torch.float64))
    if not mean > 0:
        return w
    damped = h.clone()
    damped.diagonal().add_(ridge * mean)
    lower, failed = torch.linalg.cholesky_ex(damped)
    if int(failed):
        return w
    correction = torch.cholesky_solve(missing.to(torch.float32).T, lower).T
    return w + strength * correction if bool(torch.isfinite(correction).all()) else w
