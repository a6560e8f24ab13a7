"""Stored ranges of one layer's inputs: from sketches of its sites to one scale for every linear that needs one.

An expert that few tokens reached has seen too little of what it will be given: its range is that of all experts of the
layer together, which read the same normalized states (gate, up) or values of the same kind (down). No range is ever a
placeholder (C52).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cann_llm_quant.models.arch import Layer
from cann_llm_quant.quant.activation_ranges import static_range
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.scheme import ActivationScheme
from cann_llm_quant.quant.value_sketch import ValueSketch, merged
from cann_llm_quant.recipe import ActivationFormat

FEW_TOKENS = 128


@dataclass(frozen=True)
class LayerRanges:
    """How the inputs that have stored ranges are quantized, by module, and what the user should know of it."""

    inputs: dict[str, InputQuantizer]
    warnings: tuple[str, ...]


def sites_with_ranges(layer: Layer, formats: Mapping[str, ActivationFormat]) -> list[str]:
    """Sites whose values must be sketched: any of their linears has a format with a stored range."""
    return [site.name for site in layer.sites if any(layer.linear(role).module in formats for role in site.linears)]


def layer_ranges(
    layer: Layer,
    sketches: Mapping[str, ValueSketch],
    activations: Mapping[str, ActivationScheme],
    formats: Mapping[str, ActivationFormat],
    storage: Mapping[str, torch.dtype],
) -> LayerRanges:
    """Ranges of every linear of the layer that is in `formats`; `storage` is each weight's stored dtype.

    Raises NumericError naming the site when its values are not finite.
    """
    inputs: dict[str, InputQuantizer] = {}
    shared: set[str] = set()
    for site in layer.sites:
        modules = [layer.linear(role).module for role in site.linears if layer.linear(role).module in formats]
        if not modules:
            continue
        sketch = sketches.get(site.name)
        if site.name.startswith("experts.") and (sketch is None or sketch.tokens < FEW_TOKENS):
            sketch = merged(_siblings(site.name, sketches))
            shared.add(site.name.split(".")[1])
        if sketch is None:
            raise ValueError(f"layer {layer.index}: site {site.name} was never observed")
        for module in modules:
            scheme, wanted = activations[module], formats[module]
            dtype = storage[f"{module}.weight"]
            fixed = static_range(
                sketch,
                scheme,
                wanted.range,
                percentile=wanted.percentile,
                dtype=torch.float32 if dtype == torch.float64 else dtype,
            )
            inputs[module] = InputQuantizer(scheme, fixed)
    return LayerRanges(inputs, _warnings(layer, shared))


def _siblings(site: str, sketches: Mapping[str, ValueSketch]) -> list[ValueSketch]:
    """Sketches of the same site of every expert that saw a token."""
    kind = site.split(".")[-1]
    return [sketch for name, sketch in sketches.items() if name.startswith("experts.") and name.endswith(f".{kind}")]


def _warnings(layer: Layer, shared: set[str]) -> tuple[str, ...]:
    if not shared or layer.moe is None:
        return ()
    count = f"{len(shared)} of {layer.moe.num_experts} experts"
    return (
        f"layer {layer.index}: {count} saw fewer than {FEW_TOKENS} calibration tokens; "
        "the stored ranges of their inputs are those of all experts together",
    )
