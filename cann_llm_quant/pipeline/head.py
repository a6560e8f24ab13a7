"""The final norm and the head: copied, or the head solved last, on what the quantized model's final norm gives, by the
method's own solver (drift correction included where the float model walks along).
"""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.calibrate.moments import MomentSums, SiteMoments
from cann_llm_quant.checkpoint.writer import CheckpointWriter
from cann_llm_quant.export import native
from cann_llm_quant.models.decoder import rms_norm
from cann_llm_quant.pipeline.layer import linear_entry
from cann_llm_quant.pipeline.layer_tensors import require_finite
from cann_llm_quant.pipeline.linear import SolvedLinear, rounding_error, solve_linear
from cann_llm_quant.pipeline.measure import trusted_moments
from cann_llm_quant.pipeline.prepare import Job
from cann_llm_quant.pipeline.row_blocks import blocks_scale_dtype, joined, on_host, row_blocks
from cann_llm_quant.pipeline.site import FloatLinear, solve_site
from cann_llm_quant.pipeline.states import Streams
from cann_llm_quant.quant import rtn
from cann_llm_quant.quant.error import output_error
from cann_llm_quant.quant.scheme import QuantizedTensor

HEAD = "head"


def reads_text_for_head(job: Job) -> bool:
    """Whether the head is solved on the final norm's output."""
    return job.ids is not None and job.arch.head_module in job.assignment.schemes


def write_head(job: Job, writer: CheckpointWriter, streams: Streams | None) -> dict[str, Any]:
    """Write the final norm and the head, solved where it is to be quantized; returns the record.

    `streams` hold the states after the last layer. Raises NumericError when a tensor is not finite.
    """
    if HEAD in writer.completed:
        return dict(writer.completed[HEAD])
    module, schemes = job.arch.head_module, job.assignment.schemes
    names = [name for name in job.arch.outer_shapes() if name != job.arch.embedding_name]
    tensors = {name: job.source.load(name) for name in names}
    for name, tensor in tensors.items():
        require_finite(name, tensor)
    stored: dict[str, Tensor] = {}
    linears: dict[str, Any] = {}
    warnings: tuple[str, ...] = ()
    if module in schemes:
        source = tensors.pop(f"{module}.weight")
        moments = None
        if reads_text_for_head(job) and streams is not None:
            moments = _moments(job, streams, tensors[job.arch.final_norm_name])
        solved, plain, warnings = _HeadSolver(job, source, moments).solve()
        stored |= native.encode(module, solved.weight)
        linears[module] = linear_entry(solved, plain, moments)
    record = {"kept": len(tensors), "linears": linears, "warnings": list(warnings)}
    writer.write_unit(HEAD, stored | tensors, record)
    return record


def _moments(job: Job, streams: Streams, gain: Tensor) -> SiteMoments:
    """Moments of the head's input: the final norm's output, against the float model's where that walks along."""
    gain = gain.to(job.device, job.dtype)

    def normed(x: Tensor) -> Tensor:
        return rms_norm(x, gain, job.arch.rms_norm_eps, job.arch.norm_offset).flatten(0, 1)

    sums = MomentSums()
    partner = None if streams.float_model is None else streams.float_model.windows()
    for y in streams.quantized.windows():
        sums.add(normed(y), x=None if partner is None else normed(next(partner)))
    moments = sums.finish()
    assert moments is not None, "calibration has at least one window"
    return trusted_moments(job.arch.head_module, moments)


class _HeadSolver:
    """Solves the head block by block; errors of the blocks are joined by the energy of their outputs."""

    def __init__(self, job: Job, source: Float[Tensor, "vocab hidden"], moments: SiteMoments | None) -> None:
        self._job, self._source, self._moments = job, source, moments
        self._scheme = job.assignment.schemes[job.arch.head_module]
        self._dtype = blocks_scale_dtype(job, source, self._scheme)

    def solve(self) -> tuple[SolvedLinear, float | None, tuple[str, ...]]:
        """The head with its error, plain rounding's error (both None without text) and sentences for the user."""
        parts: list[QuantizedTensor] = []
        lost = plain_lost = energy = 0.0
        warnings: dict[str, None] = {}
        for block in row_blocks(self._job, self._source):
            solved, plain, said = self._solve_block(block)
            parts.append(on_host(solved.weight))
            warnings |= dict.fromkeys(said)
            if self._moments is not None:
                share = output_error(block, self._moments.hessian)
                energy += share
                lost += share * (solved.error or 0.0)
                plain_lost += share * (plain or 0.0)
        weight = joined(parts)
        if not energy:
            return SolvedLinear(weight, None), None, tuple(warnings)
        return SolvedLinear(weight, lost / energy), plain_lost / energy, tuple(warnings)

    def _solve_block(self, block: Float[Tensor, "rows hidden"]) -> tuple[SolvedLinear, float | None, tuple[str, ...]]:
        if self._moments is None or not self._job.recipe.feedback:
            plain = rounding_error(block, self._scheme, self._dtype, self._moments)
            clip = self._job.recipe.clipping
            return (
                solve_linear(block, self._scheme, self._dtype, self._moments, clip=clip, rtn_error=plain),
                plain,
                (),
            )
        module = self._job.arch.head_module
        rounded = rtn.solve(block, self._scheme, self._dtype).dequantize()
        linear = FloatLinear(block, rounded, self._scheme, self._dtype)
        recipe = self._job.recipe
        found = solve_site({module: linear}, self._moments, recipe.effort_plan, clip=recipe.clipping)
        return found.linears[module], found.plain[module], found.warnings
