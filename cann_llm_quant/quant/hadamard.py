"""Randomized Hadamard rotations: orthogonal matrices that spread every channel over all others.

    R = diag(signs) H / sqrt(n),    H Hᵀ = n I, entries of H are +-1

An outlier channel of x becomes +-1/sqrt(n) of itself in every channel of x R, so that ranges over rows shrink to what a
normal distribution has (QuaRot, Ashkboos et al. 2024, arXiv:2404.00456). H is the Kronecker product of Sylvester's
matrices of order 2 and, for other sizes, one by Paley (1933): of order q + 1 for primes q = 3 mod 4 (12, 20, 24, 44,
60, ...), of order 2 (q + 1) for primes q = 1 mod 4 (12, 28, 36, 60, ...). It is never written out: rows are multiplied
by one factor after another.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.errors import UnsupportedError

_LARGEST_FACTOR = 64


@dataclass(frozen=True)
class Rotation:
    """R of the module's formula: `signs` are +-1, H the Kronecker product of `factors`, all float64."""

    signs: Float[Tensor, "n"]
    factors: tuple[Float[Tensor, "_ _"], ...]

    @property
    def size(self) -> int:
        """Channels that are rotated together."""
        return int(self.signs.shape[0])

    def rotate(self, x: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        """`x R` in the dtype of `x`; of several times `size` columns, each part on its own."""
        y = x.reshape(-1, self.size) * self.signs.to(x)
        after = self.size
        for factor in self.factors:
            order = factor.shape[0]
            after //= order
            # x (A kron B) is Aᵀ X B of a row written as a matrix X, so that every factor works on an axis of its own.
            if after == 1:
                y = (y.reshape(-1, order) @ factor.to(x)).reshape(-1, self.size)
            else:
                y = torch.matmul(factor.T.to(x), y.reshape(-1, order, after)).reshape(-1, self.size)
        return (y / math.sqrt(self.size)).view(x.shape)


def random_rotation(size: int, seed: int) -> Rotation:
    """The rotation of `size` channels whose signs `seed` draws. Raises UnsupportedError where no H is known."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (size,), generator=generator).to(torch.float64) * 2 - 1
    return Rotation(signs, hadamard_factors(size))


def hadamard_factors(size: int) -> tuple[Float[Tensor, "_ _"], ...]:
    """Hadamard matrices, float64, whose Kronecker product has the order `size`.

    Raises UnsupportedError where neither construction gives one.
    """
    twos = (size & -size).bit_length() - 1
    # As many factors of two as leave an order that Paley's constructions reach, if it is not 1 already.
    for exponent in range(twos, -1, -1):
        rest = _paley(size >> exponent)
        if rest is not None:
            return (*_sylvester(exponent), *([rest] if len(rest) > 1 or not exponent else []))
    raise UnsupportedError(
        f"no Hadamard matrix of order {size} is known here, so {size} channels cannot be rotated; leave out --rotate"
    )


def _sylvester(exponent: int) -> list[Tensor]:
    """Matrices of order 2^k up to 64 whose Kronecker product has the order 2^exponent."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    factors: list[Tensor] = []
    while exponent:
        part = min(exponent, _LARGEST_FACTOR.bit_length() - 1)
        matrix = torch.ones(1, 1, dtype=torch.float64)
        for _ in range(part):
            matrix = torch.kron(matrix, two)
        factors.append(matrix)
        exponent -= part
    return factors


def _paley(order: int) -> Tensor | None:
    """A Hadamard matrix of this order by Paley's constructions, None where they give none; of order 1 it is [[1]]."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if _is_prime(order - 1) and (order - 1) % 4 == 3:
        # S of the bordered residue matrix is skew here: (I + S)(I + S)ᵀ = (q + 1) I
        return torch.eye(order, dtype=torch.float64) + _bordered(order - 1, -1.0)
    q = order // 2 - 1
    if order % 2 == 0 and _is_prime(q) and q % 4 == 1:
        # and symmetric here: 0 becomes [[1, -1], [-1, -1]], +-1 becomes +-[[1, 1], [1, -1]]
        plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        zero = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(_bordered(q, 1.0), plus) + torch.kron(torch.eye(q + 1, dtype=torch.float64), zero)
    return None


def _bordered(q: int, left: float) -> Tensor:
    """Quadratic residues modulo a prime as the matrix chi(i - j), a row of ones above and a column `left` before it."""
    squares = {i * i % q for i in range(1, q)}
    chi = torch.tensor([0.0, *(1.0 if i in squares else -1.0 for i in range(1, q))], dtype=torch.float64)
    index = torch.arange(q)
    bordered = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    bordered[1:, 1:] = chi[(index.unsqueeze(1) - index) % q]
    bordered[0, 1:], bordered[1:, 0] = 1.0, left
    return bordered


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))
