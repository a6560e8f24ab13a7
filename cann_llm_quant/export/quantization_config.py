"""The `quantization_config` section of `config.json`, as compressed-tensors defines it.

One config group for each pair of a weight scheme and an activation scheme, each with the `format` (layout) of its
tensors. `ignore` lists the full name of every linear left in float, as it really is in the files (never a pattern):
runtimes map names one by one. A single group targets the class `Linear`. Several groups target patterns; experts then
get a group of their own, because transformers takes the experts' scheme from the first group whose pattern names them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cann_llm_quant.export.native import Layout, layout_of, stored_scheme
from cann_llm_quant.quant.kv import KvScheme
from cann_llm_quant.quant.number_formats import FLOAT_BITS, INT_BITS
from cann_llm_quant.quant.scheme import TILE, ActivationScheme, Scheme

FORMAT_VERSION = "0.20.1"
_EXPERT = ".experts."
_BITS = INT_BITS | FLOAT_BITS
_SCALE_DTYPES = {"e8m0": "torch.uint8", "e4m3": "torch.float8_e4m3fn"}

Kind = tuple[Scheme, ActivationScheme | None, Layout]


def quantization_config(
    schemes: Mapping[str, Scheme],
    float_modules: Iterable[str],
    activations: Mapping[str, ActivationScheme] | None = None,
    tables: Mapping[str, Sequence[str]] | None = None,
    kv: KvScheme | None = None,
) -> dict[str, Any] | None:
    """The section for these weight schemes and activation schemes by module; inputs of the others stay in float.

    `tables` are the embeddings among the modules, with all modules that read each. `kv` is the scheme of all K and V
    where one says it all. None where there is nothing to say.
    """
    if not schemes and kv is None:
        return None
    inputs, tables = activations or {}, tables or {}
    kinds: dict[str, Kind] = {}
    for module, scheme in schemes.items():
        kind = (scheme, inputs.get(module), layout_of(scheme, inputs.get(module), table=module in tables))
        kinds |= dict.fromkeys(tables.get(module, (module,)), kind)
    # The class `Linear` is no embedding.
    several = len(set(kinds.values())) > 1 or bool(tables)
    members: dict[tuple[Kind, bool], list[str]] = {}
    for module, kind in kinds.items():
        members.setdefault((kind, several and _EXPERT in module), []).append(module)
    groups = {
        f"group_{number}": _group(*kind, _targets(modules, kinds) if several else ["Linear"])
        for number, ((kind, _), modules) in enumerate(members.items())
    }
    layouts = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": "dense" if not layouts else layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "version": FORMAT_VERSION,
        "config_groups": groups,
        "ignore": list(float_modules),
        "kv_cache_scheme": None if kv is None else _kv_args(kv),
        "global_compression_ratio": None,
    }


def _group(scheme: Scheme, activations: ActivationScheme | None, layout: Layout, targets: list[str]) -> dict[str, Any]:
    return {
        "targets": targets,
        "format": layout,
        "input_activations": None if activations is None else _activation_args(activations),
        "output_activations": None,
        "weights": _weight_args(stored_scheme(scheme, layout)),
    }


def _weight_args(scheme: Scheme) -> dict[str, Any]:
    strategy = {"tile": "block", "group": "tensor_group" if scheme.scale_type == "e4m3" else "group"}
    arguments: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "int" if scheme.is_integer else "float",
        "symmetric": scheme.symmetric,
        "strategy": strategy.get(scheme.strategy, scheme.strategy),
        "group_size": scheme.group_size,
        "dynamic": False,
    }
    # Older readers refuse fields that they do not know, so these are written where they say something.
    if scheme.strategy == "tile":
        arguments["block_structure"] = [TILE, TILE]
    if scheme.scale_type != "float":
        arguments["scale_dtype"] = _SCALE_DTYPES[scheme.scale_type]
    return arguments


def _activation_args(scheme: ActivationScheme) -> dict[str, Any]:
    """Groups of 32 have power-of-two scales (MX), groups of 16 e4m3 ones under a static `input_global_scale` (NV)."""
    nvfp4 = scheme.dtype == "fp4_e2m1" and scheme.group_size == 16
    arguments = {
        "num_bits": _BITS[scheme.dtype],
        "type": "int" if scheme.dtype in INT_BITS else "float",
        "symmetric": scheme.symmetric,
        "strategy": "tensor_group" if nvfp4 else scheme.strategy,
        "group_size": scheme.group_size,
        "dynamic": "local" if nvfp4 else scheme.dynamic,
    }
    if nvfp4:
        arguments["scale_dtype"] = _SCALE_DTYPES["e4m3"]
    elif arguments["type"] == "float" and scheme.group_size == 32:
        arguments["scale_dtype"] = _SCALE_DTYPES["e8m0"]
    return arguments


def _kv_args(scheme: KvScheme) -> dict[str, Any]:
    return {
        "num_bits": scheme.bits,
        "type": "int" if scheme.dtype in INT_BITS else "float",
        "symmetric": scheme.symmetric,
        "strategy": scheme.strategy,
        "group_size": None,
        "dynamic": scheme.dynamic,
    }


def _targets(modules: list[str], every: Iterable[str]) -> list[str]:
    """A pattern for each kind of linear all of which are in `modules`, full names for the others."""
    chosen = set(modules)
    kinds: dict[str, list[str]] = {}
    for module in every:
        kinds.setdefault(_kind(module), []).append(module)
    targets: list[str] = []
    for kind in dict.fromkeys(_kind(module) for module in modules):
        whole = all(module in chosen for module in kinds[kind])
        targets += [kind] if whole else [module for module in kinds[kind] if module in chosen]
    return targets


def _kind(module: str) -> str:
    """The pattern of a linear's kind: its last two names, or its last name below `experts.N`.

    A module outside the layers (no number in its name) is a kind of its own.
    """
    if not any(part.isdigit() for part in module.split(".")):
        return module
    *_, parent, name = module.split(".")
    if _EXPERT in module:
        return rf"re:.*\.experts\.\d+\.{re.escape(name)}$"
    return rf"re:.*\.{re.escape(parent)}\.{re.escape(name)}$"
