"""Statistics of a float layer's sites on the activations that the quantized layers before it produce."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from cann_llm_quant.calibrate.experts import ExpertCollector
from cann_llm_quant.calibrate.moments import SiteMoments
from cann_llm_quant.calibrate.statistics import SiteStatistics
from cann_llm_quant.calibrate.stream import HiddenStates, run_layer
from cann_llm_quant.errors import NumericError
from cann_llm_quant.models.arch import Layer
from cann_llm_quant.pipeline.layer_tensors import build_running, load_float, quantized_sites
from cann_llm_quant.pipeline.prepare import Job
from cann_llm_quant.quant.shrinkage import shrink_hessian

SAMPLE_ROWS = 512


def measure(job: Job, layer: Layer, states: HiddenStates, step: Callable[[], None]) -> dict[str, SiteStatistics]:
    """Statistics of every site that has a quantized linear, over all windows, with the layer in float.

    Raises NumericError naming the site whose input is not finite.
    """
    running = build_running(job, layer, load_float(job, layer))
    collector = ExpertCollector(
        running,
        quantized_sites(job, layer),
        sample_rows=SAMPLE_ROWS if job.assignment.activations else 0,
        every_token=job.recipe.moe_all_experts,
    )
    for _ in run_layer(running, states.windows(), layer.index, collector.observe):
        step()
    statistics = collector.finish()
    for site, measured in statistics.items():
        # Replaced one by one, so that only one Gram matrix is held twice.
        place = f"layer {layer.index}, {site}"
        statistics[site] = replace(measured, hessian=_trusted(place, measured.hessian, measured.evidence))
    return statistics


def trusted_moments(place: str, moments: SiteMoments) -> SiteMoments:
    """The moments with the Hessian shrunk for want of tokens. Raises NumericError when the input is not finite."""
    hessian = _trusted(place, moments.hessian, moments.evidence)
    return replace(moments, hessian=hessian, added=hessian.diagonal() - moments.hessian.diagonal())


def _trusted(place: str, hessian: Tensor, tokens: int) -> Tensor:
    if not bool(torch.isfinite(hessian.diagonal()).all()):
        raise NumericError(
            f"{place}: the input holds NaN, infinity or values whose squares leave float32; "
            "scan the source's weights with inspect --scan"
        )
    return shrink_hessian(hessian, tokens)
