"""Whether the numbers of an output make sense, and how far its weights lie from those of the model it was made from.

Without a source: every number is finite, codes and zero points lie in their range, shapes are the architecture's. With
one, of each linear, relative to the root mean square of the source's weight (folded factors undone, verify_folds.py):

    largest = max |w_out - w| / rms(w)      mean = mean |w_out - w| / rms(w)      error = rms(w_out - w) / rms(w)

and, to notice scales and codes that belong elsewhere, groups and single codes (verify_groups.py). A quantized source is
compared code by code first. One matrix of each side is in memory at a time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.export.to_float import FILE_NAME as FLOAT_FILE
from cann_llm_quant.export.verify_findings import Findings, Tick, listed
from cann_llm_quant.export.verify_folds import ColumnSlopes, LayerFolds
from cann_llm_quant.export.verify_groups import check_codes, check_groups, check_multiple, looks_rounded, used_bits
from cann_llm_quant.export.verify_origin import compare_vectors
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.models.rotated_checkpoint import RotatedCheckpoint
from cann_llm_quant.quant.scheme import QuantizedTensor

_SCALE_ROUNDING = 2.0**-9  # of float16 and bfloat16 scales, generously
_CAST_ROUNDING = 2.0**-7  # of a float weight stored in bfloat16 after a factor was folded in
_FLIPPED = 2.0**-6  # relative, of single numbers, beside
_SLACK = 1e-3  # of the matrix's rms
_FEW = 0.01  # of the numbers
_UNLIKE = 0.9  # relative error; that of unrelated numbers is 1 and more
_BLOCK = 1 << 22  # elements


@dataclass(frozen=True)
class WeightError:
    """How far one linear lies from the source's; see the module's formulas. `codes` tells whether they are equal."""

    module: str
    scheme: str
    largest: float
    mean: float
    error: float
    codes: bool | None = None


def check_numbers(checkpoint: Checkpoint, findings: Findings, tick: Tick) -> int:
    """Every number of the output, a tensor at a time; the number of quantized linears."""
    packed = checkpoint if isinstance(checkpoint, PackedCheckpoint) else None
    names = list(checkpoint.tensors)
    for number, name in enumerate(names):
        tick(number, len(names), name)
        module = name.removesuffix(".weight")
        with findings.caught(str(checkpoint.path)):
            weight = packed.quantized(module) if packed is not None and name.endswith(".weight") else None
            if weight is not None:
                check_quantized(module, weight, findings)
                assert packed is not None
                packed.inputs(module)
            else:
                _check_finite(name, checkpoint.load(name), findings)
    return 0 if packed is None else len(packed.modules)


def check_quantized(module: str, weight: QuantizedTensor, findings: Findings) -> None:
    """Scales, codes and zero points of one linear."""
    _check_finite(f"{module}: scale", weight.scale, findings)
    if not weight.scheme.is_integer:
        return
    for what, codes in (("codes", weight.codes), ("zero points", weight.zero_point)):
        if codes is None or not codes.numel():
            continue
        low, high = (int(n) for n in codes.aminmax())
        if low < weight.scheme.qmin or high > weight.scheme.qmax:
            findings.add(
                module,
                f"{what} from {low} to {high} leave the range of {weight.scheme.dtype}",
                "the file is damaged, or its bits are stated wrongly; write it again",
            )


def _check_finite(where: str, tensor: Tensor, findings: Findings) -> None:
    if not tensor.is_floating_point():
        return
    bad = 0
    for part in torch.split(tensor.flatten(), _BLOCK):
        values = part.to(torch.float32) if part.dtype.itemsize < 2 else part
        bad += values.numel() - int(values.isfinite().sum())
    if bad:
        findings.add(where, f"{bad} numbers are NaN or infinite", "the file is damaged; write it again")


def compare_weights(
    ours: Checkpoint, source: Checkpoint, arch: Arch, findings: Findings, tick: Tick
) -> list[WeightError]:
    """Every matrix of the decoder against the source's, in the model's order."""
    errors: list[WeightError] = []
    total = sum(len(layer.linears) for layer in arch.layers) + 2
    rows: dict[str, Tensor] = {}
    folds = Findings()
    limit = _float_limit(ours, source, findings)
    for pair in _pairs(ours, source, arch, findings, folds, rows):
        tick(len(errors), total, pair.module)
        decoded = not isinstance(source, PackedCheckpoint) and pair.weight is None and looks_rounded(pair.out)
        errors.append(_compared(pair, _same_codes(pair, source), limit, findings, decoded=decoded))
    if not _are_strangers(errors, findings):
        findings.faults += folds.faults
        compare_vectors(ours, source, arch, rows, findings)
    _compare_others(ours, source, arch, findings)
    return errors


def _float_limit(ours: Checkpoint, source: Checkpoint, findings: Findings) -> float:
    """How far a matrix in float may lie from the source's: not at all, unless it was dequantized from codes of it."""
    rounded = (ours.path / FLOAT_FILE).is_file() and not isinstance(source, PackedCheckpoint)
    if rounded:
        findings.remark("the output was dequantized from codes, so its weights differ from a float source by rounding")
    return _UNLIKE if rounded else _CAST_ROUNDING


@dataclass(frozen=True)
class _Pair:
    """A matrix, what the source lets us expect of it, and its codes where it has any."""

    module: str
    out: Float[Tensor, "out in"]
    expected: Float[Tensor, "out in"]
    weight: QuantizedTensor | None


def _pairs(
    ours: Checkpoint, source: Checkpoint, arch: Arch, findings: Findings, folds: Findings, rows: dict[str, Tensor]
) -> Iterator[_Pair]:
    """Each matrix beside the source's; those of layers in float32.

    Puts the factors of rows into `rows`, by module, and factors that their readers do not undo into `folds`.
    """
    outer = [arch.embedding_name.removesuffix(".weight")] + ([] if arch.tied_head else [arch.head_module])
    for module in outer:
        with findings.caught(module):
            out, weight = _ours(module, ours)
            expected = source.load(f"{module}.weight")
            if _same_shape(module, out, expected, findings):
                yield _Pair(module, out, expected, weight)
    for layer in arch.layers:
        layer_folds = LayerFolds(arch, layer)
        for site in layer.sites:
            columns = layer_folds.columns(site, ours, source)
            slopes = ColumnSlopes()
            for role in site.linears:
                module = layer.linear(role).module
                with findings.caught(module):
                    out, weight = _ours(module, ours)
                    out, expected = out.to(torch.float32), source.load(f"{module}.weight").to(torch.float32)
                    if not _same_shape(module, out, expected, findings):
                        continue
                    expected = expected if columns is None else expected * columns
                    factor = layer_folds.take_rows(role, out, expected)
                    rows |= layer_folds.by_module
                    expected = expected if factor is None else expected * factor[:, None]
                    slopes.add(out, expected)
                    yield _Pair(module, out, expected, weight)
            layer_folds.check_undone(site, slopes, ours, source, folds)
        layer_folds.check_keys(folds)


def _ours(module: str, ours: Checkpoint) -> tuple[Float[Tensor, "out in"], QuantizedTensor | None]:
    """A matrix of the output, dequantized, and its codes."""
    weight = ours.quantized(module) if isinstance(ours, PackedCheckpoint) else None
    return (ours.load(f"{module}.weight") if weight is None else weight.dequantize(torch.float32)), weight


def _same_shape(module: str, out: Tensor, expected: Tensor, findings: Findings) -> bool:
    if out.shape != expected.shape:
        findings.add(
            module, f"has shape {list(out.shape)}, the source's {list(expected.shape)}", "compare with the right source"
        )
    return out.shape == expected.shape


def _same_codes(pair: _Pair, source: Checkpoint) -> bool | None:
    """Whether a linear has its source's codes; None where there are none, or others may stand for the same weights.

    Smaller groups than the source's keep its codes.
    """
    mine = pair.weight
    theirs = source.quantized(pair.module) if mine is not None and isinstance(source, PackedCheckpoint) else None
    if mine is None or theirs is None or mine.scheme.dtype != theirs.scheme.dtype:
        return None
    if torch.equal(mine.codes.view(torch.int8), theirs.codes.view(torch.int8)):
        return True
    width, wider = (one.scheme.columns_per_scale(one.shape[1]) for one in (mine, theirs))
    alike = mine.scheme.symmetric == theirs.scheme.symmetric and mine.scheme.scale_type == theirs.scheme.scale_type
    return False if alike and wider % width == 0 else None


def _compared(pair: _Pair, codes: bool | None, limit: float, findings: Findings, *, decoded: bool) -> WeightError:
    """One matrix; `decoded` where it was dequantized from codes and the source was not."""
    module, weight = pair.module, pair.weight
    gap = _measure(pair.out, pair.expected)
    if codes is False:
        findings.add(module, "codes differ from the source's", "the file is damaged, or was made from another model")
    elif codes and gap.largest > _SCALE_ROUNDING * gap.reach:
        findings.add(module, "codes are the source's, scales or zero points are not", "write the model again")
    elif weight is None and decoded and limit < gap.error <= _UNLIKE:
        findings.remark(f"{module} was dequantized from codes, so it differs from the source by rounding")
        check_multiple(module, pair.out, pair.expected, findings, bits=4)
    elif weight is None and gap.error > limit:
        findings.add(module, f"is stored in float, but {gap.error:.2g} away from the source", "write the model again")
    elif weight is None and (count := _count_flipped(pair.out, pair.expected, gap.rms)):
        what = f"is stored in float, but {count} of its numbers {'is' if count == 1 else 'are'} not the source's"
        findings.add(module, what, "the file is damaged; write the model again")
    elif weight is not None and codes is None:
        _check_rounded(pair, weight, gap.rms, findings)
    label = "float" if weight is None else weight.scheme.label()
    return WeightError(module, label, gap.largest / gap.rms, gap.mean / gap.rms, gap.error, codes)


def _check_rounded(pair: _Pair, weight: QuantizedTensor, rms: float, findings: Findings) -> None:
    """A linear against float weights, or codes that are not comparable: its groups, its whole, then single codes."""
    module, bits = pair.module, used_bits(weight)
    grouped = weight.group_index is None
    if grouped and not check_groups(module, weight, pair.out, pair.expected, rms, findings, bits=bits):
        return
    if check_multiple(module, pair.out, pair.expected, findings, bits=bits):
        check_codes(module, weight, pair.expected, findings)


@dataclass(frozen=True)
class _Gap:
    """Distance of two matrices; `error` is relative to `rms`, which is the second's, as `reach` is its largest."""

    largest: float
    mean: float
    error: float
    rms: float
    reach: float


def _measure(out: Float[Tensor, "out in"], expected: Float[Tensor, "out in"]) -> _Gap:
    """Block by block of rows, so that an embedding is never there in float32 as a whole."""
    largest = reach = 0.0
    total = squares = energy = 0.0
    rows = max(1, _BLOCK // out.shape[1])
    for start in range(0, len(out), rows):
        theirs = expected[start : start + rows].to(torch.float32)
        distance = (out[start : start + rows].to(torch.float32) - theirs).abs_()
        largest, reach = max(largest, float(distance.max())), max(reach, float(theirs.abs().max()))
        total += float(distance.sum(dtype=torch.float64))
        squares += float(distance.square_().sum(dtype=torch.float64))
        energy += float(theirs.square().sum(dtype=torch.float64))
    rms = math.sqrt(energy / out.numel()) or 1.0
    return _Gap(largest, total / out.numel(), math.sqrt(squares / out.numel()) / rms, rms, reach)


def _count_flipped(out: Float[Tensor, "out in"], expected: Float[Tensor, "out in"], rms: float) -> int:
    """Numbers that are not the source's where nearly all are: a few are lost in the error of a large matrix.

    0 where many are not, as of a head that was dequantized from codes of 8 bits for a layout that holds none.
    """
    count = 0
    for mine, theirs in zip(*(torch.split(w, max(1, _BLOCK // w.shape[1])) for w in (out, expected)), strict=True):
        wanted = theirs.to(torch.float32)
        limit = wanted.abs().mul_(_FLIPPED).add_(_SLACK * rms)
        count += int(((mine.to(torch.float32) - wanted).abs_() > limit).sum())
    return count if count <= _FEW * out.numel() else 0


def _are_strangers(errors: list[WeightError], findings: Findings) -> bool:
    """One sentence where nothing fits: then no file is damaged, but two models are compared."""
    strange = [error.module for error in errors if error.error > _UNLIKE]
    found = len(strange) > len(errors) // 2
    if found:
        findings.faults[:] = [fault for fault in findings.faults if fault.where not in set(strange)]
        findings.add(
            "--against",
            f"{len(strange)} of {len(errors)} matrices do not resemble the source's: {listed(strange)}",
            "it is another model, or the weights were changed; name the model that it was made from",
        )
    return found


def _compare_others(ours: Checkpoint, source: Checkpoint, arch: Arch, findings: Findings) -> None:
    """Tensors that are no matrix of a site: routers must be equal, norms and biases may hold folded factors."""
    matrices = {f"{layer.linear(r).module}.weight" for layer in arch.layers for s in layer.sites for r in s.linears}
    matrices |= {arch.embedding_name, f"{arch.head_module}.weight", arch.final_norm_name}
    changed: list[str] = []
    for name in arch.tensor_shapes():
        if name in matrices or name not in source.tensors or name not in ours.tensors:
            continue
        out, expected = ours.load(name), source.load(name)
        if out.shape == expected.shape and torch.equal(out, expected.to(out.dtype)):
            continue
        changed.append(name)
        turned = isinstance(source, RotatedCheckpoint)  # by another machine's arithmetic, perhaps
        if out.shape != expected.shape or (out.dim() > 1 and not (turned and _near(out, expected))):
            findings.add(
                name, "is not the source's tensor", "it is not quantized and must be equal; write the model again"
            )
    if changed:
        findings.remark(f"factors were folded into {len(changed)} norms and biases: {listed(changed)}")


def _near(out: Tensor, expected: Tensor) -> bool:
    return _measure(out, expected).error < _CAST_ROUNDING
