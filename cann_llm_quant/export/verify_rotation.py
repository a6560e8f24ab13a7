"""Whether an output is its source in rotated channels (models/rotated_checkpoint.py), and by which rotation.

Rotating the residual stream, E_out = E R, keeps every product of two rows of the embedding, E_out E_outᵀ = E Eᵀ,
whatever R is. Where the rows themselves differ but their products agree, the output is rotated, whether it says so or
not: an export has no record of it. R is drawn by a seed, which is recorded or small, so that it is found by trying.
The source seen through the same rotation is then compared as any other.

Of other rotations, learned ones say, only what no rotation changes can be compared: lengths of rows.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.export.verify_findings import Findings
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.models.rotated_checkpoint import RotatedCheckpoint
from cann_llm_quant.quant.hadamard import random_rotation

_ROWS = 64  # of the embedding
_TRIED = 256  # seeds
_ALIKE = 0.9  # cosine of what is the same but for rounding
_PRODUCTS = 0.3  # relative error of products of two rows; that of unrelated ones is 1.4
_LENGTHS = (0.5, 2.0)


def is_rotated(ours: Checkpoint, source: Checkpoint, arch: Arch) -> bool:
    """Whether rows of the embedding are others than the source's, but have the source's products."""
    out, expected = _rows(ours, source, arch)
    if out.shape != expected.shape or _cosine(out, expected) > _ALIKE:
        return False
    mine, theirs = (products - torch.diag(products.diag()) for products in (out @ out.T, expected @ expected.T))
    return bool((mine - theirs).norm() < _PRODUCTS * theirs.norm())


def rotated_alike(ours: Checkpoint, source: Checkpoint, arch: Arch) -> RotatedCheckpoint | None:
    """The source seen through the rotation of an output that is rotated; None where no seed gives it."""
    out, expected = _rows(ours, source, arch)
    for seed in _seeds(ours):
        try:
            rotation = random_rotation(arch.hidden_size, seed)
        except UnsupportedError:  # no Hadamard matrix has this size, so it is a rotation of another kind
            return None
        if _cosine(out, rotation.rotate(expected)) > _ALIKE:
            return RotatedCheckpoint(source, arch, seed)
    return None


def compare_lengths(ours: Checkpoint, source: Checkpoint, arch: Arch, findings: Findings) -> None:
    """Rows of gates, whose length neither a rotation of what they read nor a fold changes."""
    for layer in arch.layers:
        norm = next(parameter.name for parameter in layer.parameters if parameter.role == "post_norm")
        for spec in (linear for linear in layer.linears if linear.role.rsplit(".", 1)[-1] == "gate"):
            mine, theirs = (
                (one.load(f"{spec.module}.weight").to(torch.float32) * _gain(one, norm, arch)).norm(dim=1)
                for one in (ours, source)
            )
            low, high = (bound * theirs for bound in _LENGTHS)
            wrong = (mine < low) | (mine > high)
            if bool(wrong.any()):
                what = f"{int(wrong.sum())} of {len(wrong)} rows have another length (row {int(wrong.nonzero()[0])})"
                findings.add(spec.module, what, "no rotation changes it; write the model again")


def _gain(checkpoint: Checkpoint, norm: str, arch: Arch) -> Float[Tensor, "in"]:
    return arch.norm_offset + checkpoint.load(norm).to(torch.float32)


def _rows(ours: Checkpoint, source: Checkpoint, arch: Arch) -> tuple[Float[Tensor, "r in"], Float[Tensor, "r in"]]:
    """Some rows of both embeddings, evenly chosen among those that are not 0."""
    expected = source.load(arch.embedding_name)
    live = expected.abs().amax(1).nonzero().flatten()
    chosen = live[:: max(1, len(live) // _ROWS)][:_ROWS]
    out = ours.load(arch.embedding_name)
    chosen = chosen[chosen < len(out)]
    return out[chosen].to(torch.float32), expected[chosen].to(torch.float32)


def _cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()).clamp(min=torch.finfo(torch.float32).tiny))


def _seeds(ours: Checkpoint) -> Iterator[int]:
    """The recorded seed, then the likely ones."""
    inference: Any = getattr(getattr(ours, "reader", None), "inference", None)
    calibration = None if inference is None else inference.provenance.recipe.get("calibration")
    seed = calibration.get("seed") if isinstance(calibration, dict) else None
    if isinstance(seed, int):
        yield seed
    yield from range(_TRIED)
