"""What a recipe and the flags say of the KV cache: formats of K and V by layer, and which tokens stay in float.

Formats are one line of text, the same in a recipe, in `--kv-cache` and for every command that takes them:

    SPEC    = RULE { ("," | ";") RULE }  |  "auto"
    RULE    = [ LAYERS ":" ] FORMAT          without LAYERS: all layers that no other rule names; the last rule wins
    LAYERS  = "first" N | "last" N | list    N layers or a share such as 30%; a list of numbers such as 0,3,8-11
    FORMAT  = ONE | "k=" ONE "v=" ONE
    ONE     = TYPE { "-" OPTION }            int8, int8-head, int4-g32-asym, fp8_e4m3-token
    TYPE    = int8 | int4 | fp8_e4m3 | fp8_e5m2 | fp16 | bf16 | float
    OPTION  = tensor | head | channel | token | gN  |  sym | asym  |  static | dynamic

`first 30%: fp8_e5m2, last 30%: fp16` leaves the layers between in `float`, the type that the model computes in. Unless
said otherwise integers have one scale a `channel` for K and a `token` for V, fp8 one a `tensor`; scales are symmetric
and static (calibrated). `int8` and `int4` without options are dynamic, `int4` asymmetric as well: RoPE turns slow
channels of K out of the range that calibration saw as texts grow longer than its windows. Tokens and groups of N
channels of a token are always dynamic: nothing could be known of them beforehand. Dynamic scales of the others belong
to one page. `auto` measures which formats cost least within a number of stored bits per value (`bits`, `--kv-bits`).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from cann_llm_quant.errors import UsageError

KvTypeName = Literal["int8", "int4", "fp8_e4m3", "fp8_e5m2", "fp16", "bf16"]
KvStrategyName = Literal["tensor", "head", "channel", "token", "group"]
Side = Literal["k", "v"]
SensitiveClass = Literal["numbers", "names"]

TYPES = ("int8", "int4", "fp8_e4m3", "fp8_e5m2", "fp16", "bf16", "float")
PLAIN = ("fp16", "bf16", "float")
_STRATEGIES = ("tensor", "head", "channel", "token")
HALF_OF_FP16 = 8.0
_FLOAT32_TINY, _FLOAT32_MAX = 2.0**-126, 2.0**127  # stored scales are float32
_ALIASES = {"fp8": "fp8_e4m3"}
_GROUP = re.compile(r"g([1-9]\d*)")
_PAIR = re.compile(r"k=(\S+)\s+v=(\S+)")
_EDGE = re.compile(r"(first|last)\s+(\d+(?:\.\d+)?)\s*(%?)")
_RANGE = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")


@dataclass(frozen=True)
class KvFormat:
    """The number format of K or of V; its fields are those of `quant.kv.KvScheme`."""

    dtype: KvTypeName
    symmetric: bool = True
    strategy: KvStrategyName = "tensor"
    group_size: int | None = None
    dynamic: bool = False

    @property
    def calibrated(self) -> bool:
        """Whether scales are stored, which calibration must measure."""
        return self.dtype not in PLAIN and not self.dynamic


@dataclass(frozen=True)
class KvPair:
    """Formats of K and of V in a layer; None is the type that the model computes in."""

    k: KvFormat | None = None
    v: KvFormat | None = None


@dataclass(frozen=True)
class KvRule:
    """A pair and the layers that get it: numbers, or None for all that no other rule names."""

    layers: str | None
    pair: KvPair


@dataclass(frozen=True)
class KvSpec:
    """A parsed SPEC; see the module's grammar. `auto`: formats are still to be measured and chosen."""

    rules: tuple[KvRule, ...]
    auto: bool = False

    @property
    def calibrated(self) -> bool:
        """Whether any layer stores scales, or may come to."""
        if self.auto:
            return True
        formats = [one for rule in self.rules for one in (rule.pair.k, rule.pair.v)]
        return any(one is not None and one.calibrated for one in formats)

    @property
    def is_float(self) -> bool:
        """Whether every layer keeps the type that the model computes in."""
        return not self.auto and all(rule.pair == KvPair() for rule in self.rules)

    def layers(self, num_layers: int) -> tuple[KvPair, ...]:
        """The pair of each layer. Raises UsageError for a rule that names layers the model does not have, and for
        `auto`, which only `quantize` can measure.
        """
        if self.auto:
            raise UsageError("the KV cache auto is measured by quantize, which stores what it chose; name formats here")
        default = [rule.pair for rule in self.rules if rule.layers is None]
        pairs = [default[-1] if default else KvPair()] * num_layers
        for rule in self.rules:
            for layer in () if rule.layers is None else _numbers(rule.layers, num_layers):
                pairs[layer] = rule.pair
        return tuple(pairs)


def parse_rules(text: str) -> KvSpec:
    """The rules of a SPEC. Raises UsageError that names the part which is wrong."""
    if text.strip().lower() == "auto":
        return KvSpec((), auto=True)
    parts = _parts(text)
    if not parts:
        raise UsageError("a KV cache format is missing; write int8, or first 30%: fp8_e5m2, last 30%: fp16")
    rules = [_rule(part) for part in parts]
    if sum(rule.layers is None for rule in rules) > 1:
        raise UsageError(f"KV cache {text!r} has two formats for all layers; put layers before one, such as first 4: …")
    return KvSpec(tuple(rules))


def _parts(text: str) -> list[str]:
    """Rules, cut at commas and semicolons; the numbers of a list of layers stay together."""
    parts: list[str] = []
    numbers: list[str] = []
    for piece in re.split("[,;]", text.lower()):
        piece = " ".join(piece.split())
        if _RANGE.fullmatch(piece):
            numbers.append(piece)
        elif piece:
            parts.append(",".join([*numbers, piece]))
            numbers = []
    return parts + [",".join(numbers)] * bool(numbers)


def _rule(text: str) -> KvRule:
    layers, colon, formats = text.rpartition(":")
    if not colon:
        return KvRule(None, _pair(formats.strip()))
    layers = layers.strip()
    if not _EDGE.fullmatch(layers) and not all(_RANGE.fullmatch(item.strip()) for item in layers.split(",")):
        raise UsageError(f"{layers!r} names no layers; write first 30%, last 4, or numbers such as 0,3,8-11")
    return KvRule(layers, _pair(formats.strip()))


def _pair(text: str) -> KvPair:
    match = _PAIR.fullmatch(text)
    if match is None and "=" in text:
        raise UsageError(f"{text!r} does not give both K and V; write k=int8-channel v=int4-token, or v=float")
    if match is None:
        return KvPair(_one(text, "k"), _one(text, "v"))
    return KvPair(_one(match[1], "k"), _one(match[2], "v"))


def _one(text: str, side: Side) -> KvFormat | None:
    name, *options = text.split("-")
    name = _ALIASES.get(name, name)
    if name not in TYPES:
        raise UsageError(
            f"{text!r} is no KV cache format; choose from {', '.join(TYPES)}, with options such as int8-head or "
            "k=int8-channel v=int4-token"
        )
    if name in PLAIN:
        if options:
            raise UsageError(f"{text!r}: {name} stores values as they are; leave out {', '.join(options)}")
        return None if name == "float" else KvFormat(cast(KvTypeName, name))
    return _format(text, name, options, side)


def _format(text: str, name: str, options: list[str], side: Side) -> KvFormat:
    strategy = _only(text, options, _is_strategy)
    symmetry, when = _only(text, options, ("sym", "asym").__contains__), _only(text, options, _is_time)
    unknown = [option for option in options if option not in (strategy, symmetry, when)]
    if unknown:
        raise UsageError(
            f"{text!r}: {unknown[0]!r} is no option; choose from tensor, head, channel, token, gN, sym, asym, static, "
            "dynamic"
        )
    integer = name.startswith("int")
    strategy = strategy or ("tensor" if not integer else "channel" if side == "k" else "token")
    group = _GROUP.fullmatch(strategy)
    each = strategy == "token" or group is not None
    bare = integer and not options
    symmetric = symmetry == "sym" if symmetry else not (bare and name == "int4")
    dynamic = when == "dynamic" if when else each or bare
    if each and not dynamic:
        raise UsageError(f"{text!r}: scales of single tokens cannot be known beforehand; leave out static")
    if not integer and not symmetric:
        raise UsageError(f"{text!r}: {name} has no zero points; leave out asym")
    return KvFormat(
        cast(KvTypeName, name),
        symmetric,
        "group" if group else cast(KvStrategyName, strategy),
        int(group[1]) if group else None,
        dynamic,
    )


def _is_strategy(option: str) -> bool:
    return option in _STRATEGIES or _GROUP.fullmatch(option) is not None


def _is_time(option: str) -> bool:
    return option in ("static", "dynamic")


def _only(text: str, options: list[str], belongs: Callable[[str], bool]) -> str:
    """The one option of its kind, empty where there is none."""
    found = [option for option in options if belongs(option)]
    if len(found) > 1:
        raise UsageError(f"{text!r}: {found[0]} and {found[1]} exclude each other; give one")
    return found[0] if found else ""


def _numbers(layers: str, num_layers: int) -> list[int]:
    edge = _EDGE.fullmatch(layers)
    if edge is None:
        return [number for item in layers.split(",") for number in _range(item, num_layers)]
    count = float(edge[2])
    if (edge[3] and count > 100) or (not edge[3] and count != int(count)):
        raise UsageError(f"{layers!r} is no number of layers; write first 4 or first 30%")
    # half a layer and more counts, and a rule that is written is never empty
    wanted = max(1, int(num_layers * count / 100 + 0.5)) if edge[3] else int(count)
    if not 0 < wanted <= num_layers:
        raise UsageError(f"{layers!r} asks for {wanted} layers of a model that has {num_layers}")
    return list(range(wanted) if edge[1] == "first" else range(num_layers - wanted, num_layers))


def _range(item: str, num_layers: int) -> range:
    match = _RANGE.fullmatch(item.strip())
    assert match is not None, "checked when the rule was read"
    first, last = int(match[1]), int(match[2] or match[1])
    if not first <= last < num_layers:
        raise UsageError(f"layers {item.strip()} are not in a model of {num_layers}, whose last is {num_layers - 1}")
    return range(first, last + 1)


def _joined(value: Any) -> Any:
    """Rules may be a list of texts."""
    return ", ".join(value) if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value) else value


def _checked(text: str) -> str:
    try:
        parse_rules(text)
    except UsageError as error:
        raise ValueError(str(error)) from error
    return text


def _listed(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


class KvRecipe(BaseModel):
    """The section `kv_cache` of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    scheme: Annotated[str, BeforeValidator(_joined), AfterValidator(_checked)] = Field(
        default="int8", description="formats of K and V by layer, such as int8 or first 30%: fp8_e5m2, last 30%: fp16"
    )
    bits: float | None = Field(
        default=None, gt=0, le=16, description="stored bits per value that auto may take; null: 8, half of FP16"
    )
    candidates: Annotated[tuple[str, ...] | None, BeforeValidator(_listed)] = Field(
        default=None, description="formats to choose from, such as int8-channel; null: some of 4, 8 and 16 bits"
    )
    sink_tokens: int = Field(default=0, ge=0, description="first tokens of a text whose pages stay in float")
    recent_tokens: int = Field(default=0, ge=0, description="latest tokens of a text whose pages stay in float")
    sensitive: Annotated[tuple[SensitiveClass, ...], BeforeValidator(_listed)] = Field(
        default=(), description="pages with such tokens stay in float: numbers, names"
    )
    page_size: Literal[16, 32, 128] = Field(default=32, description="tokens of a page; dynamic scales are of one page")
    headroom: float = Field(default=1.0, gt=0, le=16, description="range of stored scales, in units of the one seen")
    percentile: float = Field(
        default=100.0,
        gt=50,
        le=100,
        description="share of the values that stored ranges hold, half of the rest beyond either end",
    )
    scale: float | None = Field(
        default=None, ge=_FLOAT32_TINY, le=_FLOAT32_MAX, description="one scale for all instead of measured ones"
    )
    smooth: bool = Field(default=False, description="even out K's channels by powers of two folded into q and k")

    @model_validator(mode="after")
    def _used(self) -> "KvRecipe":
        """Refuse what would do nothing."""
        if (self.bits is not None or self.candidates is not None) and not self.spec.auto:
            raise ValueError(f"bits and candidates are of the scheme auto, not of {self.scheme!r}; leave them out")
        if self.spec.auto and self.scale is not None:
            raise ValueError("auto measures scales, so none can be given; leave out scale")
        if self.spec.is_float and (self.sink_tokens or self.recent_tokens or self.sensitive):
            raise ValueError(
                f"{self.scheme!r} keeps every page in float; leave out sink_tokens, recent_tokens and sensitive, or "
                "name another format"
            )
        static = self.spec.calibrated
        if not static and (self.scale is not None or self.headroom != 1 or self.percentile != 100):
            raise ValueError(f"scale, headroom and percentile are for stored scales, which {self.scheme!r} has none of")
        if self.scale is not None and (self.headroom != 1 or self.percentile != 100):
            raise ValueError("a given scale leaves nothing to headroom and percentile; drop one of them")
        keys = [rule.pair.k for rule in self.spec.rules]
        if (
            self.smooth
            and not self.spec.auto
            and all(one is None or one.dtype in PLAIN or one.strategy == "channel" for one in keys)
        ):
            raise ValueError("smooth is for channels of K that share a scale, as in int8-head; leave it out")
        return self

    @property
    def spec(self) -> KvSpec:
        """The parsed `scheme`."""
        return parse_rules(self.scheme)

    @property
    def budget(self) -> float | None:
        """Stored bits per value that `auto` may take; None where formats are named."""
        return (self.bits or HALF_OF_FP16) if self.spec.auto else None

    @property
    def needs_calibration(self) -> bool:
        """Whether text must run through the model: for scales, or for the sizes of K's channels."""
        return self.smooth or (self.scale is None and self.spec.calibrated)
