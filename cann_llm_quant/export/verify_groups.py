"""Parts of a quantized linear that do not fit the source's weights: whole groups, and single codes.

A group's slope <w_out, w> / <w, w> is 1 but for noise; a scale or zero point that belongs elsewhere shows there. Noise
depends on the bits that codes were rounded to, which a layout may hold in more (2 in 4, as GGUF's and Ascend's types
do): they are taken from the numbers that a group uses, not from the scheme.

A code that was changed afterwards is an outlier of its linear. In steps of its group, and what clipping explains apart,

    e = |w_out - clamp(w, lowest, highest number of the group)| / scale

Rounding leaves e <= 1/2; zero points and searched ranges leave 1.3. Feeding errors back (GPTQ) leaves a tail: over 260
linears of 2, 3, 4 and 8 bits the largest e was 7.4, never more than 3.7 times the 64th largest (docs/verify.md). What
lies beyond 6 times that, and 2.5 steps, was not written by any of these.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.export.verify_findings import Findings
from cann_llm_quant.quant.scheme import QuantizedTensor, row_scales

_SLOPES = {2: (-0.25, 3.0), 3: (0.3, 2.0), 8: (0.85, 1.15)}  # by bits; others:
_USUAL_SLOPES = (0.5, 1.5)
_MULTIPLES = {2: 1.0, 3: 0.2, 8: 0.03}  # by bits, how far a whole matrix may be from 1 times the source's; others:
_USUAL_MULTIPLE = 0.1
_FAR = 1.5  # relative error of a group that no rounding to 4 bits leaves
_SHIFT = 0.5  # of a group's mean, in steps; rounding errors average out
_FAINT = 0.05  # groups fainter than this share of the matrix's rms say little
_BELOW = 0.75  # steps: groups whose numbers are smaller have become 0 for the most part
_RANK = 64  # the error that outliers are measured by
_BEYOND = 6.0  # times that error
_STEPS = 2.5
_SAMPLE = 256  # rows
_NEIGHBOURS = 32  # columns
_DIFFERENT = 0.9  # of neighbours
_BLOCK = 1 << 22  # elements at a time


def used_bits(weight: QuantizedTensor) -> int:
    """Bits that the codes of most groups make use of: those that they were rounded to, whatever holds them."""
    scheme, (out, columns) = weight.scheme, weight.shape
    width = scheme.columns_per_scale(columns)
    if not scheme.is_integer or columns % width:
        return scheme.bits
    codes = weight.rows(0, min(out, max(1, _BLOCK // columns))).codes if scheme.strategy != "tile" else weight.codes
    low, high = torch.aminmax(codes.reshape(len(codes), -1, width), dim=-1)
    numbers = int((high.to(torch.int16) - low.to(torch.int16) + 1).flatten().median())
    return min(scheme.bits, max(2, (numbers - 1).bit_length()))


def looks_rounded(matrix: Float[Tensor, "out in"]) -> bool:
    """Whether a matrix in float repeats its numbers as codes of up to 6 bits do.

    Of 32 neighbours in a row 31 differ in bfloat16, about 24 where they were rounded to 6 bits, 16 and fewer to 4.
    """
    rows = matrix[:_SAMPLE, : matrix.shape[1] // _NEIGHBOURS * _NEIGHBOURS].reshape(-1, _NEIGHBOURS)
    ordered = rows.to(torch.float32).sort(dim=1).values
    return bool((ordered.diff(dim=1) != 0).to(torch.float32).mean() < _DIFFERENT) if len(rows) else False


def check_groups(
    module: str,
    weight: QuantizedTensor,
    out: Float[Tensor, "out in"],
    expected: Float[Tensor, "out in"],
    rms: float,
    findings: Findings,
    *,
    bits: int,
) -> bool:
    """Whether every group fits; a fault otherwise. `rms` is that of the source's whole matrix, `bits` are `used_bits`.

    Groups whose weights are a wrong multiple of the source's, their scale belonging to others, or are shifted. `out` is
    `weight`, dequantized.
    """
    scheme, out, expected = weight.scheme, out.to(torch.float32), expected.to(torch.float32)
    width = scheme.columns_per_scale(out.shape[1])
    if out.shape[1] % width:
        width = out.shape[1]
    mine, theirs = (w.reshape(len(w), -1, width) for w in (out, expected))
    energy = theirs.square().sum(-1)
    loud = energy > (_FAINT * rms) ** 2 * width
    if width == scheme.columns_per_scale(out.shape[1]) and scheme.is_integer and scheme.strategy != "tile":
        step = row_scales(weight.scale, scheme, len(out)).abs()
        loud &= torch.maximum(energy, mine.square().sum(-1)) > (_BELOW * step) ** 2 * width
    slope = torch.where(loud, (mine * theirs).sum(-1) / torch.where(loud, energy, 1.0), 1.0)
    low, high = _SLOPES.get(bits, _USUAL_SLOPES)
    wrong = (slope < low) | (slope > high)
    if bool(wrong.any()):
        row, group = (int(n) for n in wrong.nonzero()[0])
        findings.add(
            module,
            f"{int(wrong.sum())} of {wrong.numel()} groups are no multiple near 1 of the source's (row {row}, group "
            f"{group}: {float(slope[row, group]):.3g})",
            "their scales, zero points or codes belong elsewhere; write the model again",
        )
        return False
    far = loud & ((mine - theirs).square().sum(-1) > _FAR**2 * energy)
    if bits >= 4 and bool(far.any()):
        row, group = (int(n) for n in far.nonzero()[0])
        findings.add(
            module,
            f"{int(far.sum())} of {far.numel()} groups are farther from the source's than zeros are (row {row}, group "
            f"{group})",
            "their zero points or codes are wrong; write the model again",
        )
        return False
    steps = (mine.amax(-1) - mine.amin(-1)) / ((1 << bits) - 1)
    shift = float(torch.where(steps > 0, (mine - theirs).mean(-1) / steps, 0.0).median())
    if scheme.is_integer and abs(shift) > _SHIFT:
        findings.add(
            module,
            f"most groups lie {shift:+.1f} steps beside the source's",
            "zero points are read one off, as of another version of the layout; correct the config",
        )
        return False
    return True


def check_multiple(
    module: str, out: Float[Tensor, "out in"], expected: Float[Tensor, "out in"], findings: Findings, *, bits: int
) -> bool:
    """Whether a linear as a whole is 1 times the source's; a fault otherwise. `bits` are `used_bits`.

    Noise of single groups averages out, so that scales which are all off by one factor show: over 300 linears of all
    methods the slope was at most 0.001 from 1 at 8 bits, 0.03 at 4 and 0.07 at 3.
    """
    product = energy = 0.0
    step = max(1, _BLOCK // expected.shape[1])
    for mine, theirs in zip(torch.split(out, step), torch.split(expected, step), strict=True):
        product += float((mine * theirs).sum(dtype=torch.float64))
        energy += float(theirs.square().sum(dtype=torch.float64))
    slope = product / energy if energy else 1.0
    if abs(slope - 1) <= _MULTIPLES.get(bits, _USUAL_MULTIPLE):
        return True
    findings.add(
        module,
        f"is as a whole {slope:.3g} times the source's",
        "its scales, or those of what it reads, belong elsewhere; write the model again",
    )
    return False


def check_codes(module: str, weight: QuantizedTensor, expected: Float[Tensor, "out in"], findings: Findings) -> None:
    """Single codes that no rounding of the source gives; nothing is said of numbers that are not evenly spaced."""
    if not weight.scheme.is_integer or weight.scheme.strategy == "tile":
        return
    rank = max(1, min(_RANK, expected.numel() // 64))
    largest = torch.zeros(0)
    for _, errors in _error_blocks(weight, expected):
        largest = torch.cat([largest, errors.flatten()])
        largest = largest.topk(min(rank + 1, len(largest))).values
    limit = max(_STEPS, _BEYOND * float(largest[-1]))
    if float(largest[0]) <= limit:
        return
    found = [(begin + row, column) for begin, e in _error_blocks(weight, expected) for row, column in _beyond(e, limit)]
    row, column = found[0]
    findings.add(
        module,
        f"{len(found)} {'code is' if len(found) == 1 else 'codes are'} farther from the source's weight than any "
        f"method rounds, up to {float(largest[0]):.1f} steps (row {row}, column {column})",
        "the file is damaged; write the model again",
    )


def _error_blocks(weight: QuantizedTensor, expected: Float[Tensor, "out in"]) -> Iterator[tuple[int, Tensor]]:
    """The first row of each block, and e of the module's formula for its rows."""
    step = max(1, _BLOCK // expected.shape[1])
    for begin in range(0, len(expected), step):
        end = min(len(expected), begin + step)
        yield begin, _errors(weight.rows(begin, end), expected[begin:end].to(torch.float32))


def _errors(weight: QuantizedTensor, expected: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
    scheme, (out, columns) = weight.scheme, weight.shape
    group = weight.group_index
    if group is None:
        group = torch.arange(columns) // scheme.columns_per_scale(columns)
    scale = row_scales(weight.scale, scheme, out)
    zero = 0 if weight.zero_point is None else weight.zero_point.to(torch.float32)
    ends = [(end - zero) * scale for end in (scheme.qmin, scheme.qmax)]
    low, high = torch.minimum(*ends), torch.maximum(*ends)  # scales of GGUF and MLX may be negative
    nearest = expected.clamp(low.index_select(1, group), high.index_select(1, group))
    steps = scale.abs().clamp(min=torch.finfo(torch.float32).tiny)
    return (weight.dequantize(torch.float32) - nearest).abs_().div_(steps.index_select(1, group))


def _beyond(errors: Float[Tensor, "rows in"], limit: float) -> list[list[int]]:
    places: list[list[int]] = (errors > limit).nonzero().tolist()
    return places
