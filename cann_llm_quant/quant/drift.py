"""What a linear should compute so that its output is the float model's, although its input has already drifted.

Earlier layers are quantized, so a linear reads y where the float model reads x, and its layer's residual stream is r_y
where it should be r_x. The matrix T whose outputs come closest to W x + (r_x - r_y), in the least squares sense over
the calibration tokens, is

    T = W + (W C + D) (H + ridge)⁻¹     H = sum y yᵀ,  C = sum (x - y) yᵀ,  D = sum (r_x - r_y) yᵀ

and rounding T instead of W lets each layer undo what those before it did. (Asymmetric calibration: GPTAQ, Li et al.
2025, arXiv:2504.02692; Qronos, Zhang et al. 2025, arXiv:2505.11695. The residual term D is ours: o and down add to a
stream whose error they can see.) The correction is fitted to few tokens and overfits if taken whole, hence `strength`
< 1 and a ridge of a share of H's mean diagonal.
"""

import torch
from jaxtyping import Float
from torch import Tensor

STRENGTH = 0.6
RIDGE = 0.1


def drift_target(
    w: Float[Tensor, "out in"],
    hessian: Float[Tensor, "in in"],
    cross: Float[Tensor, "in in"],
    residual: Float[Tensor, "out in"] | None,
    *,
    strength: float = STRENGTH,
    ridge: float = RIDGE,
) -> Float[Tensor, "out in"]:
    """T of the module's formula in float32; `residual` (D) is for linears whose output is added to the stream.

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
    missing = w @ cross
    if residual is not None:
        missing += residual
    correction = torch.cholesky_solve(missing.T, lower).T
    return w + strength * correction if bool(torch.isfinite(correction).all()) else w
