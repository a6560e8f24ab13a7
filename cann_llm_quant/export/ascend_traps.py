"""What of a whole model would fail, or go wrong in silence, where an Ascend runtime loads it; found before any work.

Each trap was seen in the runtimes' sources; docs/ascend.md has the list with the versions.
"""

from collections.abc import Mapping

import torch

from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.export.ascend_targets import Target, is_expert, type_of
from cann_llm_quant.export.ascend_types import AscendType
from cann_llm_quant.export.layout import PackedModel

_PACKED: tuple[AscendType, ...] = ("W4A8_DYNAMIC", "W4A16")


def linear_types(model: PackedModel, target: Target) -> dict[str, AscendType]:
    """The type of every quantized linear, by module. Raises UnsupportedError where one has none."""
    found: dict[str, AscendType] = {}
    for module, scheme in model.schemes.items():
        kind = type_of(scheme, model.activations.get(module), target)
        if kind is None:
            raise UnsupportedError(f"{module}: ascend has no type for {scheme.label()} with such inputs")
        found[module] = kind
    return found


def check_model(model: PackedModel, types: Mapping[str, AscendType], target: Target) -> list[str]:
    """Warnings, a sentence each. Raises UnsupportedError for what `target` would not load or would compute wrongly."""
    _check_outer(model, target)
    _check_fused(model, types)
    _check_experts(model, types, target)
    _check_prefixes(model, types)
    _check_biases(model, types, target)
    group_size(model, types)
    static = [module for module, kind in types.items() if kind == "W8A8"]
    if static and model.dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(
            f"{static[0]}: static int8 inputs need a bfloat16 or float16 model, whose deq_scale they have; this one is "
            f"{str(model.dtype).removeprefix('torch.')}"
        )
    return _warnings(model, types, target)


def group_size(model: PackedModel, types: Mapping[str, AscendType]) -> int:
    """The one group size of int4 weights that the description can name, 0 for none.

    Raises UnsupportedError when there are several.
    """
    sizes: dict[int, str] = {}
    for module, kind in types.items():
        if kind in _PACKED:
            sizes.setdefault(model.schemes[module].group_size or 0, module)
    if len(sizes) > 1:
        (one, first), (two, second) = sorted(sizes.items())[:2]
        raise UnsupportedError(
            f"ascend has one group size for all int4 weights, but {first} has {one or 'none'} and {second} {two}; "
            f"use --regroup {one or two}"
        )
    return next(iter(sizes), 0)


def _check_outer(model: PackedModel, target: Target) -> None:
    arch = model.arch
    embedding = arch.embedding_name.removesuffix(".weight")
    if embedding in model.schemes:
        raise UnsupportedError(f"{embedding}: Ascend runtimes read embeddings in float; quantize without it")
    if arch.head_module in model.schemes and not target.quantized_head:
        raise UnsupportedError(f"{arch.head_module}: {target.name} reads the head in float; quantize without it")


def _check_fused(model: PackedModel, types: Mapping[str, AscendType]) -> None:
    """C23: members of a fused matrix have one type, or the runtime raises."""
    for members in model.fused():
        kinds = {types.get(module) for module in members}
        if len(kinds) > 1:
            has = ", ".join(f"{module.rpartition('.')[2]} {types.get(module, 'FLOAT')}" for module in members)
            raise UnsupportedError(
                f"{members[0]} and those it is fused with must have one type, they have {has}; quantize them alike"
            )


def _check_experts(model: PackedModel, types: Mapping[str, AscendType], target: Target) -> None:
    """Runtimes look up one expert of a layer for all of them."""
    for layer in model.arch.layers:
        modules = [spec.module for spec in layer.linears if is_expert(spec.module)]
        kinds = {types.get(module) for module in modules}
        if not modules or kinds == {None}:
            continue
        if len(kinds) > 1:
            odd = next(module for module in modules if types.get(module) != types.get(modules[0]))
            raise UnsupportedError(
                f"{odd} is {types.get(odd, 'FLOAT')} and {modules[0]} {types.get(modules[0], 'FLOAT')}; all routed "
                "experts of a layer must have one type"
            )
        if target.expert_models is not None and model.arch.model_type not in target.expert_models:
            raise UnsupportedError(
                f"{modules[0]}: {target.name} finds no quantized experts of {model.arch.model_type}, only of "
                f"{', '.join(sorted(target.expert_models))}; keep the experts in float or choose another runtime"
            )


def _check_prefixes(model: PackedModel, types: Mapping[str, AscendType]) -> None:
    """A linear counts as float when any float weight's name begins with its own."""
    fused = {module for members in model.fused() for module in members}
    plain = [name for name in model.arch.tensor_shapes() if name.endswith(".weight")]
    plain = [name for name in plain if name.removesuffix(".weight") not in types]
    for module in types:
        if module in fused or is_expert(module):
            continue
        sibling = next((name for name in plain if name.startswith(module)), None)
        if sibling is not None:
            raise UnsupportedError(
                f"{module} would be loaded as float, because the float {sibling} begins with its name; keep it in float"
            )


def _check_biases(model: PackedModel, types: Mapping[str, AscendType], target: Target) -> None:
    if not target.name.startswith("vllm-ascend"):
        return
    for layer in model.arch.layers:
        for spec in layer.linears:
            if spec.bias and types.get(spec.module) == "W4A8_DYNAMIC":
                raise UnsupportedError(
                    f"{spec.module} has a bias, which {target.name} leaves out of int4 linears; keep the linear in "
                    "float or int8"
                )


def _warnings(model: PackedModel, types: Mapping[str, AscendType], target: Target) -> list[str]:
    dense = [module for module, kind in types.items() if kind == "W4A8_DYNAMIC" and not is_expert(module)]
    warnings = []
    if any(model.activations.get(module) is not None for module in dense):
        warnings.append(
            "vllm-ascend does not quantize the inputs of dense W4A8_DYNAMIC linears; it computes them in float."
        )
    if target.name == "mindie" and {"W4A16", "W8A16"} & set(types.values()):
        warnings.append(
            "Weight-only types are for MindIE's ATB models; its newer runtime takes their codes for float weights."
        )
    return warnings
