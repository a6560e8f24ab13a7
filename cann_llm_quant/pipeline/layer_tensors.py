"""A layer's tensors for the pipeline: from the source in float, from the journal, and built to run."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cann_llm_quant.checkpoint.writer import CheckpointWriter
from cann_llm_quant.errors import NumericError
from cann_llm_quant.export import native
from cann_llm_quant.export.native_inputs import decode_inputs
from cann_llm_quant.models.arch import Layer
from cann_llm_quant.models.decoder import DecoderLayer
from cann_llm_quant.models.weights import build_layer, load_layer
from cann_llm_quant.pipeline.prepare import Job
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.scheme import Scheme


def load_float(job: Job, layer: Layer) -> dict[str, Tensor]:
    """The source's tensors by name, in float32 on the device. Raises NumericError for NaN and infinity."""
    tensors = load_layer(job.source, job.arch, layer.index, job.device, torch.float32)
    for name, tensor in tensors.items():
        require_finite(name, tensor)
    return tensors


def require_finite(name: str, tensor: Tensor) -> None:
    """NaN would spread through its group, and infinity would come out as a large number that no scan finds later."""
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        first = (~torch.isfinite(tensor)).nonzero()[0].tolist()
        raise NumericError(
            f"tensor {name} of the source holds NaN or infinity, first at {first}; inspect --scan lists all of them"
        )


def stored_layer(writer: CheckpointWriter, layer: Layer, schemes: Mapping[str, Scheme]) -> dict[str, Tensor]:
    """A journaled layer as float32 tensors under their source names."""
    stored = writer.read_unit(f"layer.{layer.index}")
    tensors = {
        f"{spec.module}.weight": native.decode(spec.module, stored, schemes[spec.module]).dequantize()
        for spec in layer.linears
        if spec.module in schemes
    }
    names = layer.tensor_shapes().keys() - tensors.keys()
    return tensors | {name: tensor.to(torch.float32) for name, tensor in stored.items() if name in names}


def stored_inputs(job: Job, writer: CheckpointWriter, layer: Layer) -> dict[str, InputQuantizer]:
    """How the linears of a journaled layer quantize their inputs, by module."""
    schemes = {spec.module: job.assignment.activations.get(spec.module) for spec in layer.linears}
    if not any(schemes.values()):
        return {}
    stored = writer.read_unit(f"layer.{layer.index}")
    return {module: decode_inputs(module, scheme, stored) for module, scheme in schemes.items() if scheme is not None}


def build_running(
    job: Job, layer: Layer, tensors: Mapping[str, Tensor], inputs: Mapping[str, InputQuantizer] | None = None
) -> DecoderLayer:
    """The layer as it runs: in the compute dtype, on the device; linears in `inputs` quantize what they are given."""
    on_device = {name: tensor.to(job.device, job.dtype) for name, tensor in tensors.items()}
    return build_layer(job.arch, layer.index, on_device, inputs or {})


def layer_schemes(job: Job, layer: Layer) -> dict[str, Scheme]:
    """Schemes of the layer's quantized linears, by module."""
    schemes = job.assignment.schemes
    return {spec.module: schemes[spec.module] for spec in layer.linears if spec.module in schemes}


def storage_dtypes(job: Job, layer: Layer) -> dict[str, torch.dtype]:
    """The stored dtype of each of the layer's tensors, by name."""
    return {name: job.source.tensors[name].dtype for name in layer.tensor_shapes()}


def quantized_sites(job: Job, layer: Layer) -> list[str]:
    """Sites that have a quantized linear."""
    schemes = job.assignment.schemes
    return [s.name for s in layer.sites if any(layer.linear(role).module in schemes for role in s.linears)]
