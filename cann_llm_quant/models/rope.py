"""Rotary position embedding (Su et al., 2104.09864) in the half-split layout of Hugging Face checkpoints.

Channel pair `(i, i + d/2)` of a head turns by the angle `position * f_i`, `f_i = theta^(-2i/d)`:

    rotated = x * cos + (-x[d/2:], x[:d/2]) * sin

Families that store pairs of neighbours `(2i, 2i + 1)` instead have their turning channels put into this order first:
attention is a sum over channels, so that the order is no concern as long as q and k share it.

Scaling kinds change `f` (and `yarn` also multiplies cos and sin by an attention factor):

    linear    f / factor
    dynamic   theta grows with the number of positions in sight (NTK-aware, reddit u/bloc97 and u/emozilla)
    yarn      a ramp between f and f / factor over the channels (2309.00071, equations 17-23)
    llama3    the same idea with a ramp over the wavelengths (Llama 3.1)

Frequencies and angles are float32; cos and sin are rounded to the activations' dtype last.

`dynamic` follows transformers' `generate`: a prompt is turned with the theta of its whole length, however it is cut
into chunks; then every new token with the theta of the length that it makes, while keys in the cache stay as they were
turned. Unlike transformers it keeps no memory of longer earlier texts.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cann_llm_quant.models.arch import Rope


def rotary_dim(rope: Rope, head_dim: int) -> int:
    """Number of leading channels of a head that turn."""
    return int(head_dim * rope.parameters.get("partial_rotary_factor", 1.0))


def frequencies(rope: Rope, head_dim: int, length: int) -> tuple[Float[Tensor, "half"], float]:
    """Float32 angle per position of each channel pair, and the factor on cos and sin.

    `length` is the number of positions in sight (longest position + 1); only `dynamic` depends on it.
    """
    dim = rotary_dim(rope, head_dim)
    if rope.kind == "dynamic":
        return _powers(_dynamic_theta(rope, dim, length), dim), 1.0
    plain = _powers(rope.theta, dim)
    if rope.kind == "linear":
        return plain / rope.parameters["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, dim), _yarn_attention_factor(rope)
    return plain, 1.0


def cos_sin(
    rope: Rope,
    head_dim: int,
    positions: Int[Tensor, "batch seq"],
    dtype: torch.dtype,
    length: int | None = None,
) -> tuple[Float[Tensor, "batch seq dim"], Float[Tensor, "batch seq dim"]]:
    """Cosines and sines for `positions`, on their device.

    `length` is the number of positions in sight; by default the longest of `positions` is the last one.
    """
    if length is None:
        length = int(positions.max()) + 1 if rope.kind == "dynamic" else 0
    per_position, factor = frequencies(rope, head_dim, length)
    angles = positions[..., None].float() * per_position.to(positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(
    x: Float[Tensor, "batch heads seq head_dim"],
    cos: Float[Tensor, "batch seq dim"],
    sin: Float[Tensor, "batch seq dim"],
) -> Float[Tensor, "batch heads seq head_dim"]:
    """Turn the first `dim` channels of every head; the rest passes through."""
    dim = cos.shape[-1]
    turning, still = x[..., :dim], x[..., dim:]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
    return turned if dim == x.shape[-1] else torch.cat((turned, still), dim=-1)


def halves_from_pairs(
    x: Float[Tensor, "batch heads seq head_dim"], dim: int
) -> Float[Tensor, "batch heads seq head_dim"]:
    """The first `dim` channels of every head from the order of neighbours to that of halves."""
    return torch.cat((x[..., 0:dim:2], x[..., 1:dim:2], x[..., dim:]), dim=-1)


def _powers(theta: float, dim: int) -> Float[Tensor, "half"]:
    """`theta^(-2i/dim)` for i = 0 .. dim/2 - 1."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _dynamic_theta(rope: Rope, dim: int, length: int) -> float:
    """The base that keeps the slowest pair within the trained range when `length` exceeds it."""
    factor: float = rope.parameters["factor"]
    stretch = factor * max(length, rope.trained_positions) / rope.trained_positions - (factor - 1)
    return float(rope.theta * stretch ** (dim / (dim - 2)))


def _llama3(rope: Rope, plain: Float[Tensor, "half"]) -> Float[Tensor, "half"]:
    """Wavelengths beyond the trained length / low are divided by factor, those under / high stay, linear between."""
    p = rope.parameters
    factor: float = p["factor"]
    low: float = p["low_freq_factor"]
    high: float = p["high_freq_factor"]
    trained: int = p["original_max_position_embeddings"]
    turns = plain * (trained / (2 * math.pi))
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * keep + plain / factor * (1 - keep)


def _yarn(rope: Rope, plain: Float[Tensor, "half"], dim: int) -> Float[Tensor, "half"]:
    """Pairs that turn more than beta_fast times within the trained length stay, those under beta_slow are divided."""
    p = rope.parameters
    factor: float = p["factor"]
    trained: int = p["original_max_position_embeddings"]

    def pair_turning(times: float) -> float:
        return dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_turning(p.get("beta_fast", 32)), pair_turning(p.get("beta_slow", 1))
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # an empty ramp becomes a step, as in the reference implementation
    width = high - low if high != low else 0.001
    divided = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / factor * divided + plain * (1 - divided)


def _yarn_attention_factor(rope: Rope) -> float:
    """`0.1 ln(factor) + 1`, unless the config gives the factor or DeepSeek's pair of mscales."""
    p = rope.parameters
    if "attention_factor" in p:
        return float(p["attention_factor"])

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(p["factor"]) + 1.0 if p["factor"] > 1 else 1.0

    if "mscale" in p and "mscale_all_dim" in p:
        return temperature(p["mscale"]) / temperature(p["mscale_all_dim"])
    return temperature(1.0)
