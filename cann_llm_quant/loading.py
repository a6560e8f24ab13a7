"""What other runtimes will not load of a model whose schemes are resolved, said before the work.

The facts are of transformers 5.24 with compressed-tensors 0.20 (measured on small models) and of vLLM's loaders (read).
See docs/design.md, decision 18.
"""

from collections.abc import Mapping

from cann_llm_quant.models.arch import Arch, LinearSpec
from cann_llm_quant.quant.scheme import TILE, ActivationScheme, Scheme


def family_warnings(arch: Arch) -> list[str]:
    """Families of which transformers wants other matrices than this tool writes."""
    if arch.model_type != "glm":
        return []
    return [
        "transformers' glm has gate and up in one matrix, does not find them apart and puts random numbers in their "
        "place; load the output with vLLM or this tool's runner"
    ]


def mixture_warnings(schemes: Mapping[str, Scheme], kept: Mapping[str, str], linears: list[LinearSpec]) -> list[str]:
    """Mixtures of schemes that transformers will not load."""
    experts = [spec.module for spec in linears if spec.role.startswith("experts.")]
    warnings = []
    if len({schemes.get(module) for module in experts}) > 1:
        left = sum(module in kept for module in experts)
        differ = f"{left} of {len(experts)} experts' linears stay in float" if left else "experts differ in scheme"
        warnings.append(f"{differ}: transformers loads experts of one scheme only")
    asymmetric = [module for module, scheme in schemes.items() if not scheme.symmetric]
    if any(module in experts for module in asymmetric):
        warnings.append("asymmetric experts: transformers loads symmetric ones only")
    elif asymmetric and len(set(schemes.values())) > 1:
        warnings.append("asymmetric linears beside another scheme: transformers 5.24 cannot load them")
    return warnings


def format_warnings(
    schemes: Mapping[str, Scheme], activations: Mapping[str, ActivationScheme], linears: list[LinearSpec]
) -> list[str]:
    """Number formats that runtimes do not load, or load wrongly (transformers 5.24, compressed-tensors 0.20)."""
    warnings = []
    odd = sorted({scheme.bits for scheme in schemes.values() if scheme.bits not in (4, 8)})
    if odd:
        bits = " and ".join(map(str, odd))
        warnings.append(f"{bits}-bit weights: transformers loads them, vLLM and SGLang load 4 and 8 bits only")
    tiles = [s for s in linears if s.module in schemes and schemes[s.module].strategy == "tile"]
    partial = [f"{s.module} ({s.in_features} columns)" for s in tiles if s.in_features % TILE]
    if partial:
        more = " …" if partial[1:] else ""
        warnings.append(f"vLLM loads tiles only where 128 divides a linear's input: {partial[0]}{more}")
    experts = dict.fromkeys(
        (schemes[spec.module], activations.get(spec.module))
        for spec in linears
        if spec.role.startswith("experts.") and spec.module in schemes
    )
    for name in dict.fromkeys(_unloadable_expert(*kind) for kind in experts):
        if name is not None:
            warnings.append(f"{name} experts: transformers 5.24 cannot load them")
    if any(scheme.scale_type == "e4m3" for scheme, _ in experts):
        warnings.append("nvfp4 experts: transformers 5.24 drops their global scale and computes nonsense")
    return warnings


def _unloadable_expert(scheme: Scheme, activations: ActivationScheme | None) -> str | None:
    if scheme.dtype == "int8" and activations is not None:
        return "int8 (beside quantized inputs)"
    fp8_by_rows = scheme.strategy in ("channel", "tensor")
    return scheme.label() if scheme.dtype == "fp8_e4m3" and not fp8_by_rows else None


def tensor_parallel_warnings(arch: Arch, schemes: dict[str, Scheme], degree: int) -> list[str]:
    """Row-parallel linears (o, down) are split along their input: each part must hold whole groups."""
    split = []
    for layer in arch.layers:
        for spec in layer.linears:
            scheme = schemes.get(spec.module)
            row_parallel = spec.role == "o" or spec.role.split(".")[-1] == "down"
            if not row_parallel or scheme is None or scheme.group_size is None:
                continue
            part, rest = divmod(spec.in_features, degree)
            if rest or part % scheme.group_size:
                split.append(f"{spec.module} ({spec.in_features} columns, groups of {scheme.group_size})")
    if not split:
        return []
    return [
        f"{len(split)} linears do not split into whole groups over {degree} devices, tensor-parallel runtimes cannot "
        f"load them: {split[0]}{' …' if len(split) > 1 else ''}"
    ]
