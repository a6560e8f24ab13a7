"""Which AscendV1 types each runtime of Ascend NPUs loads, and the type that a linear is stored as for it.

| weights                | input             | type                                                          |
|------------------------|-------------------|---------------------------------------------------------------|
| int8, a scale a row    | int8 token        | W8A8_DYNAMIC                                                  |
| int8, a scale a row    | int8 static       | W8A8                                                          |
| int8, a scale a row    | float             | W8A16                                                         |
| int4                   | float             | W4A16 for MindIE; else W4A8_DYNAMIC, which vllm-ascend 0.23 to |
|                        |                   | 0.25 runs as a weight-only type where the linear is dense     |
| int4                   | int8 token        | W4A8_DYNAMIC                                                  |

Narrower integers are stored in the next wider ones of these, which is exact. What a runtime loads was read in its
sources: vllm-ascend 0.23.0, 0.25.1rc1 and main of August 2026, MindIE-LLM of April 2026, SGLang of 2026.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cann_llm_quant.errors import UsageError
from cann_llm_quant.export.ascend_types import AscendType
from cann_llm_quant.quant.scheme import ActivationScheme, Scheme

_EXPERT = re.compile(r"(?:^|\.)experts\.\d+\.")
_TOKEN = ActivationScheme("int8")
_INT8_ROWS = Scheme("int8", True, "channel", None)
# int4 goes to the matrix unit eight to a word along the outputs
_WORD = 8


@dataclass(frozen=True)
class Target:
    """What one runtime loads.

    `dense` and `experts` are the types of linears outside and inside routed experts. `expert_models` are the model
    types whose experts may be quantized at all (None: any). `int4_groups` are the group sizes of int4 weights, empty
    where any multiple of 32 below the number of inputs does; `zero_points` says whether asymmetric weight-only types
    are read as they are written.
    """

    name: str
    dense: frozenset[AscendType]
    experts: frozenset[AscendType]
    expert_models: frozenset[str] | None = None
    int4_groups: tuple[int, ...] = ()
    zero_points: bool = False
    quantized_head: bool = False
    kv_cache: bool = False


_DYNAMIC_EXPERTS: frozenset[AscendType] = frozenset({"W8A8_DYNAMIC", "W4A8_DYNAMIC"})
_INT8: frozenset[AscendType] = frozenset({"W8A8", "W8A8_DYNAMIC", "W8A16"})
_INT4: frozenset[AscendType] = frozenset({"W4A8_DYNAMIC"})
# Of the families that we know: vllm-ascend finds the experts of others under no key of the description.
_VLLM_MIXTURES = frozenset({"qwen3_moe"})


def _vllm(version: str, dense: frozenset[AscendType]) -> Target:
    name = f"vllm-ascend-{version}"
    return Target(name, dense, _DYNAMIC_EXPERTS, _VLLM_MIXTURES, quantized_head=True, kv_cache=True)


_ALL = (
    _vllm("0.23", _INT8 | _INT4),
    _vllm("0.24", _INT8 | _INT4),
    _vllm("0.25", _INT8 | _INT4),
    _vllm("main", _INT8),
    Target("mindie", _INT8 | {"W4A16"}, _DYNAMIC_EXPERTS, int4_groups=(64, 128, 256), zero_points=True, kv_cache=True),
    Target("sglang", frozenset({"W8A8", "W8A8_DYNAMIC"}), _DYNAMIC_EXPERTS),
)
TARGETS: Mapping[str, Target] = {target.name: target for target in _ALL}
DEFAULT_RUNTIME = "vllm-ascend-0.23"


def target_named(runtime: str) -> Target:
    """The target of this name. Raises UsageError for another one."""
    if runtime not in TARGETS:
        raise UsageError(f"unknown Ascend runtime {runtime!r}; choose from {', '.join(TARGETS)}")
    return TARGETS[runtime]


def is_expert(module: str) -> bool:
    """Whether a module belongs to a routed expert, by its name."""
    return _EXPERT.search(module) is not None


def type_of(scheme: Scheme, activations: ActivationScheme | None, target: Target) -> AscendType | None:
    """The type that a linear of these schemes is stored as; None where there is none."""
    if not scheme.is_integer:
        return None
    if scheme.bits <= 4:
        weight_only: AscendType = "W4A16" if "W4A16" in target.dense else "W4A8_DYNAMIC"
        return weight_only if activations is None else "W4A8_DYNAMIC" if activations == _TOKEN else None
    if activations is None:
        return "W8A16"
    if activations == _TOKEN:
        return "W8A8_DYNAMIC"
    return "W8A8" if activations.dtype == "int8" and not activations.dynamic else None


def why_not(
    module: str, scheme: Scheme, activations: ActivationScheme | None, shape: tuple[int, int], target: Target
) -> str | None:
    """Why a linear cannot be stored for `target`, as the end of a sentence about it; None where it can."""
    kind = type_of(scheme, activations, target)
    if kind is None:
        return _no_type(scheme, activations)
    expert = is_expert(module)
    if kind not in (target.experts if expert else target.dense):
        return _not_loaded(kind, target, expert, activations)
    if not scheme.symmetric and not (target.zero_points and kind in ("W8A16", "W4A16")):
        return f"has zero points, with which {target.name} computes wrongly"
    if scheme.bits > 4:
        rows = scheme.strategy in ("channel", "tensor")
        return None if rows else f"has {_grain(scheme)}, and {kind} has one a row"
    return _why_not_int4(kind, scheme, activations, shape, target, expert)


def nearest_scheme(scheme: Scheme, shape: tuple[int, int], target: Target) -> Scheme:
    """What a refused linear would be rounded to: int4 in groups where the bits were few and it fits, else int8."""
    few = scheme.bits <= 4 and bool(target.dense & {"W4A8_DYNAMIC", "W4A16"}) and shape[0] % _WORD == 0
    for size in (scheme.group_size, 128, 64, 32) if few else ():
        if size is not None and size <= 256 and _group_fits(size, shape[1], target):
            return Scheme("int4", True, "group", size)
    return _INT8_ROWS


def _no_type(scheme: Scheme, activations: ActivationScheme | None) -> str:
    if not scheme.is_integer:
        return f"is {scheme.label()}, and NPUs before Ascend 950 compute with integers"
    assert activations is not None, "weights alone have a type"
    symmetry = "" if activations.symmetric else "asymmetric "
    range_ = activations.strategy if activations.dynamic else "static"
    known = "float or int8 token" if scheme.bits <= 4 else "float, int8 token or int8 static"
    return f"has {symmetry}{activations.dtype} {range_} inputs, and {scheme.dtype} weights take {known} ones there"


def _not_loaded(kind: AscendType, target: Target, expert: bool, activations: ActivationScheme | None) -> str:
    loads = ", ".join(sorted(target.experts if expert else target.dense))
    reason = f"is {kind}, and {target.name} loads {'routed experts' if expert else 'dense linears'} as {loads}"
    if kind == "W4A8_DYNAMIC" and not expert and target.name.startswith("vllm-ascend"):
        return f"{reason}; vllm-ascend-0.25 is the last to load it"
    return f"{reason}; quantize its inputs to int8 by token" if expert and activations is None else reason


def _grain(scheme: Scheme) -> str:
    if scheme.strategy == "group":
        return f"a scale for {scheme.group_size} columns"
    return f"a scale a {scheme.strategy}"


def _why_not_int4(
    kind: AscendType,
    scheme: Scheme,
    activations: ActivationScheme | None,
    shape: tuple[int, int],
    target: Target,
    expert: bool,
) -> str | None:
    out, columns = shape
    if kind == "W4A8_DYNAMIC" and expert and activations is None:
        return f"is int4 with float inputs, which {target.name} quantizes in experts; quantize them to int8 by token"
    if scheme.strategy not in ("group", "channel"):
        return f"has {_grain(scheme)}, and int4 weights have them by group or row there"
    if kind == "W4A8_DYNAMIC" and out % _WORD:
        return f"has {out} outputs, and int4 words hold {_WORD} of them"
    if kind == "W4A16" and (columns if scheme.strategy == "channel" else out) % 2:
        return f"is {out} x {columns}, and int4 codes go in pairs"
    if scheme.strategy == "channel":
        whole = kind == "W4A16" or expert
        return None if whole else f"has a scale a row, and dense {kind} linears have groups of {_wanted_groups(target)}"
    if _group_fits(scheme.columns_per_scale(columns), columns, target):
        return None
    return f"has groups of {scheme.group_size} of {columns} columns, and {target.name} takes {_wanted_groups(target)}"


def _wanted_groups(target: Target) -> str:
    if target.int4_groups:
        return ", ".join(map(str, target.int4_groups))
    return "32, 64, 96, …, fewer than all columns"


def _group_fits(size: int, columns: int, target: Target) -> bool:
    if columns % size:
        return False
    return size in target.int4_groups if target.int4_groups else size % 32 == 0 and size < columns
