"""Named mixes of schemes, as rules for one model: by role and layer, so that they fit every family.

attention-fp16-ffn-int8   q, k, v and o stay in float, the MLPs (experts too) get INT8, one scale a row
edges-int8                in the first and the last eighth of the layers q/k/v and down get INT8, one scale a row;
                          the rest keeps the recipe's scheme (the idea of the K-mixes of GGUF, whose v and down get
                          more bits there; v shares a scheme with q and k, which runtimes fuse)
"""

from collections.abc import Callable, Iterable

from cann_llm_quant.models.arch import Arch, Layer, LinearSpec
from cann_llm_quant.recipe import Preset, Rule, WeightScheme

ATTENTION = ("q", "k", "v", "o")
INT8 = WeightScheme(bits=8, group_size=-1)


def preset_rules(arch: Arch, preset: Preset) -> tuple[Rule, ...]:
    """The preset's rules, with full names."""
    if preset == "attention-fp16-ffn-int8":
        attention = _modules(arch.layers, lambda spec: spec.role in ATTENTION)
        others = _modules(arch.layers, lambda spec: spec.role not in ATTENTION)
        return Rule(match=attention, scheme="skip"), Rule(match=others, scheme=INT8)
    edge = -(-arch.num_layers // 8)
    layers = [layer for layer in arch.layers if min(layer.index, arch.num_layers - 1 - layer.index) < edge]
    modules = _modules(layers, lambda spec: spec.role in ("q", "k", "v") or spec.role.split(".")[-1] == "down")
    return (Rule(match=modules, scheme=INT8),)


def _modules(layers: Iterable[Layer], wanted: Callable[[LinearSpec], bool]) -> tuple[str, ...]:
    return tuple(spec.module for layer in layers for spec in layer.linears if spec.quantizable and wanted(spec))
