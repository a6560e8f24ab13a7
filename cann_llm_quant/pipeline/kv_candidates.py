"""Formats that a layer's keys and values may get, in the words of kv_recipe.py, and what they store."""

from collections.abc import Iterable, Mapping, Sequence

from cann_llm_quant.errors import UsageError
from cann_llm_quant.kv_recipe import Side, parse_rules
from cann_llm_quant.kv_spec import parse_kv_spec
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.quant.kv import KvScheme, LayerKv

DEFAULT_KV_CANDIDATES = (
    "int4",
    "int4-g32-asym",
    "int8",
    "int8-channel",
    "int8-channel-dynamic",
    "int8-token",
    "fp8_e4m3",
    "fp16",
)
SIDES: tuple[Side, Side] = ("k", "v")

Candidates = Mapping[Side, Mapping[str, KvScheme | None]]
"""Schemes by label, by side, in the order in which they were named; None is `float`."""


def candidates_of(names: Sequence[str] | None, arch: Arch) -> Candidates:
    """The schemes that `names` (None: those of the default that the heads can hold) mean for K and for V.

    A name is a FORMAT of kv_recipe.py; what two names mean alike is one scheme. Raises UsageError for names that are
    none and for groups that do not divide the heads.
    """
    pairs = [_pair(name) for name in names or DEFAULT_KV_CANDIDATES]
    found: dict[Side, dict[str, KvScheme | None]] = {"k": {}, "v": {}}
    for pair in pairs:
        for side in SIDES:
            scheme = side_of(pair, side)
            if names is None and scheme is not None and scheme.group_size and arch.head_dim % scheme.group_size:
                continue
            if scheme is not None:
                scheme.check(arch.head_dim)
            found[side].setdefault(label_of(scheme), scheme)
    return found


def named_pairs(names: Sequence[str] | None, offered: Candidates) -> list[tuple[str, str]]:
    """The labels of K and V that each name means for all layers alike, where both are offered; no pair twice."""
    meant = (_pair(name) for name in names or DEFAULT_KV_CANDIDATES)
    pairs = dict.fromkeys((label_of(pair.k), label_of(pair.v)) for pair in meant)
    return [(k, v) for k, v in pairs if k in offered["k"] and v in offered["v"]]


def _pair(name: str) -> LayerKv:
    rules = parse_rules(name).rules
    if len(rules) != 1 or rules[0].layers is not None:
        raise UsageError(f"{name!r} is no format for every layer; write candidates such as int8,int4-g32-asym,fp16")
    return parse_kv_spec(name, 1)[0]


def side_of(layer: LayerKv, side: Side) -> KvScheme | None:
    """The scheme of one side."""
    return layer.k if side == "k" else layer.v


def one_side(side: Side, scheme: KvScheme | None) -> LayerKv:
    """A layer with one side in `scheme`, and the other in float."""
    return LayerKv(k=scheme) if side == "k" else LayerKv(v=scheme)


def label_of(scheme: KvScheme | None) -> str:
    """The scheme's label, which is also its FORMAT."""
    return "float" if scheme is None else scheme.label()


def page_bits(scheme: KvScheme | None, arch: Arch, page_size: int) -> int:
    """Stored bits of one page of K or of V of one layer, dynamic scales included; float counts as 16 bits a value."""
    heads, dim = arch.num_kv_heads, arch.head_dim
    return 16 * heads * page_size * dim if scheme is None else 8 * scheme.page_bytes(heads, page_size, dim)


def spec_text(layers: Sequence[LayerKv]) -> str:
    """The SPEC that means exactly these schemes, one rule for each pair with the numbers of its layers."""
    numbers: dict[str, list[int]] = {}
    for number, layer in enumerate(layers):
        k, v = label_of(layer.k), label_of(layer.v)
        numbers.setdefault(k if k == v else f"k={k} v={v}", []).append(number)
    if len(numbers) == 1:
        return next(iter(numbers))
    return ", ".join(f"{layer_ranges(found)}: {pair}" for pair, found in numbers.items())


def layer_ranges(numbers: Iterable[int]) -> str:
    """Rising numbers in short, such as `0,3,8-11`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
