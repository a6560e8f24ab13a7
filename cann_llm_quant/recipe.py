"""What to do with a model, as one validated document: method, weight schemes by rule, calibration, layouts.

Command-line flags are shorthand for a `Recipe`; the output directory holds the resolved one. Patterns in rules are a
full module name, `glob:` with shell wildcards, or `re:` with a regular expression; all three must match the whole
name.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from cann_llm_quant.errors import UsageError
from cann_llm_quant.kv_recipe import KvRecipe

Format = Literal["native", "ascend", "awq", "gptq", "gptq_v2", "mlx", "gguf", "onnx", "float"]
DEFAULT_CANDIDATES = ("W4g64", "W3g64", "W4g128", "W4g32", "W5g64", "W6g64", "W8")


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _listed(value: Any) -> Any:
    """One string where a list is meant is a list of one."""
    return (value,) if isinstance(value, str) else value


Patterns = Annotated[tuple[str, ...], BeforeValidator(_listed), Field(min_length=1)]


class ActivationFormat(_Document):
    """How the inputs of linears are quantized.

    `dynamic` takes ranges per token as they come; static ranges are one a tensor, estimated over the calibration set
    by `range` (`moving` follows the windows' extremes, the others look at the whole set).
    """

    type: Literal["int4", "int8", "fp8", "mxfp8", "mxfp4", "nvfp4"] = "int8"
    dynamic: bool = True
    symmetric: bool = True
    range: Literal["minmax", "moving", "percentile", "mse", "entropy"] = "minmax"
    percentile: float = Field(default=99.9, gt=50, le=100)

    @model_validator(mode="after")
    def _possible(self) -> "ActivationFormat":
        integer = self.type in ("int4", "int8")
        if not integer and not self.symmetric:
            raise ValueError(f"{self.type} activations have no zero points; only int4 and int8 can be asymmetric")
        if self.type in ("mxfp8", "mxfp4", "nvfp4") and not self.dynamic:
            raise ValueError(f"{self.type} activations take each group's scale as it comes; they cannot be static")
        if not self.dynamic and self.range == "entropy" and not (integer and self.symmetric):
            raise ValueError("entropy ranges are of symmetric int activations; choose percentile or mse")
        return self

    @property
    def needs_range(self) -> bool:
        """Whether calibration must measure the inputs' values; NVFP4 stores one factor a tensor beside its groups."""
        return not self.dynamic or self.type == "nvfp4"


FLOAT_TYPE_BITS = {"fp8": 8, "mxfp8": 8, "mxfp4": 4, "nvfp4": 4}
BLOCK_COLUMNS = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}

NAMED_SCHEMES: dict[str, dict[str, Any]] = {
    "W8A16": {"bits": 8, "group_size": -1},
    "W8A8": {"bits": 8, "group_size": -1, "activations": {"type": "int8"}},
    "W8A8-STATIC": {"bits": 8, "group_size": -1, "activations": {"type": "int8", "dynamic": False}},
    "W4A16": {"bits": 4},
    "W4A8": {"bits": 4, "activations": {"type": "int8"}},
    "W4A4": {"bits": 4, "activations": {"type": "int4"}},
    "W3A16": {"bits": 3},
    "W2A16": {"bits": 2},
    "FP8": {"type": "fp8", "activations": {"type": "fp8"}},
    "FP8-STATIC": {"type": "fp8", "activations": {"type": "fp8", "dynamic": False}},
    "FP8-BLOCK": {"type": "fp8", "group_size": "block", "activations": {"type": "fp8"}},
    "FP8A16": {"type": "fp8"},
    "MXFP8": {"type": "mxfp8", "activations": {"type": "mxfp8"}},
    "MXFP8A16": {"type": "mxfp8"},
    "MXFP4": {"type": "mxfp4", "activations": {"type": "mxfp4"}},
    "MXFP4A16": {"type": "mxfp4"},
    "NVFP4": {"type": "nvfp4", "activations": {"type": "nvfp4"}},
    "NVFP4A16": {"type": "nvfp4"},
}


class WeightScheme(_Document):
    """Weight format asked for, and the format of the inputs of the same linears (`activations`, null: float).

    `group_size` -1 is one group per row, `auto` is 128 or the largest that fits each linear (one group per row for
    fp8), `tensor` is one scale for the matrix and `block` one for every tile of 128 x 128 (fp8). The block formats have
    groups of their own. A name of `NAMED_SCHEMES` in any case stands for the whole.
    """

    type: Literal["int", "fp8", "mxfp8", "mxfp4", "nvfp4"] = "int"
    bits: Literal[2, 3, 4, 5, 6, 8] = 4
    group_size: int | Literal["auto", "tensor", "block"] = "auto"
    symmetric: bool = True
    activations: ActivationFormat | None = None

    @model_validator(mode="before")
    @classmethod
    def _spelled_out(cls, value: Any) -> Any:
        if isinstance(value, str):
            if value.upper() not in NAMED_SCHEMES:
                raise ValueError(f"{value!r} is no scheme; choose from {', '.join(NAMED_SCHEMES)}")
            value = NAMED_SCHEMES[value.upper()]
        if isinstance(value, dict) and "bits" not in value and value.get("type") in FLOAT_TYPE_BITS:
            value = value | {"bits": FLOAT_TYPE_BITS[value["type"]]}
        return value

    @model_validator(mode="after")
    def _possible(self) -> "WeightScheme":
        bits = FLOAT_TYPE_BITS.get(self.type, self.bits)
        if bits != self.bits:
            raise ValueError(f"{self.type} weights have {bits} bits, not {self.bits}; leave the bits out")
        if self.type != "int" and not self.symmetric:
            raise ValueError(f"{self.type} weights have no zero points; only int weights can be asymmetric")
        columns = BLOCK_COLUMNS.get(self.type)
        if columns is not None and self.group_size not in ("auto", columns):
            raise ValueError(f"{self.type} weights have groups of {columns}; leave the group size out")
        if self.group_size == "block" and self.type != "fp8":
            raise ValueError("tiles of 128 x 128 are for fp8 weights; choose another group size")
        return self

    @field_validator("group_size", mode="before")
    @classmethod
    def _no_flag(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("a group size is a number or auto")
        return value

    @field_validator("group_size")
    @classmethod
    def _positive_or_channel(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value != -1 and value <= 0:
            raise ValueError(f"{value} is not a group size; use a positive number, or -1 for one group per row")
        return value


CANDIDATE = re.compile(r"W(?P<bits>[234568])(?:g(?P<group>\d+))?(?P<asymmetric>a)?")
FLOAT = "float"


def parse_candidate(name: str) -> WeightScheme | None:
    """The scheme of a short name: `W4g64` is 4 bits in groups of 64, `W8` one scale a row, a final `a` asymmetric;
    `float` is None.

    Raises ValueError for anything else.
    """
    if name == FLOAT:
        return None
    match = CANDIDATE.fullmatch(name)
    if match is None or match["group"] == "0":
        raise ValueError(f"{name!r} is no scheme; write W4g64, W4g64a (asymmetric), W8 (one scale per row) or float")
    size = -1 if match["group"] is None else int(match["group"])
    return WeightScheme.model_validate(
        {"bits": int(match["bits"]), "group_size": size, "symmetric": match["asymmetric"] is None}
    )


def spell_candidate(scheme: WeightScheme) -> str:
    """The short name of an integer scheme with a group size in numbers."""
    group = "" if scheme.group_size == -1 else f"g{scheme.group_size}"
    return f"W{scheme.bits}{group}{'' if scheme.symmetric else 'a'}"


def _candidates(value: tuple[str, ...]) -> tuple[str, ...]:
    for name in value:
        parse_candidate(name)
    return tuple(dict.fromkeys(value))


Candidates = Annotated[tuple[str, ...], BeforeValidator(_listed), AfterValidator(_candidates), Field(min_length=1)]
Preset = Literal["attention-fp16-ffn-int8", "edges-int8"]


def _head(value: WeightScheme | None) -> WeightScheme | None:
    """Rows of the head are solved in blocks, so that no scale may reach over rows."""
    if value is None:
        return None
    if value.activations is not None:
        raise ValueError("the head's input stays in float; leave activations out")
    if value.type != "int" or value.group_size in ("tensor", "block"):
        raise ValueError("the head is stored as integers with scales of one row; use type int and a group size or -1")
    return value


def _embedding(value: WeightScheme | None) -> WeightScheme | None:
    if value is None or value == WeightScheme(bits=8, group_size=-1):
        return value
    raise ValueError("embeddings are symmetric int8 with one scale a row (bits 8, group_size -1), or stay in float")


Head = Annotated[WeightScheme | None, AfterValidator(_head)]
Embedding = Annotated[WeightScheme | None, AfterValidator(_embedding)]


class Rule(_Document):
    """Linears whose name matches any pattern get this scheme, or stay in float (`skip`). Later rules win."""

    match: Patterns
    scheme: WeightScheme | Literal["skip"]


class Calibration(_Document):
    """Text that calibration runs on: `samples` windows of `length` tokens; `default` is the text inside the package."""

    data: Patterns = ("default",)
    samples: int = Field(default=128, gt=0)
    length: int = Field(default=512, gt=1)
    seed: int = 0


def _in_order(value: Any) -> Any:
    """Parts of a method in the order in which they work, however they were written."""
    order = ("smoothquant", "awq", "gptq")
    parts = str(value).split("+")
    return "+".join(sorted(parts, key=order.index)) if set(parts) <= set(order) else value


Method = Annotated[
    Literal[
        "none",
        "rtn",
        "awq",
        "smoothquant",
        "smoothquant+awq",
        "gptq",
        "awq+gptq",
        "smoothquant+gptq",
        "smoothquant+awq+gptq",
    ],
    BeforeValidator(_in_order),
]


@dataclass(frozen=True)
class EffortPlan:
    """What error feedback may cost: whether the float model walks along so that drift can be corrected, rounds of
    coordinate descent on codes and scales.
    """

    drift: bool
    rounds: int


EFFORTS = {"fast": EffortPlan(False, 0), "balanced": EffortPlan(True, 1), "best": EffortPlan(True, 3)}


class Recipe(_Document):
    """One quantization, whole: everything that decides the output's bytes besides the source model."""

    method: Method = "gptq"
    effort: Literal["fast", "balanced", "best"] = Field(
        default="balanced", description="what the method may cost; see docs/methods.md"
    )
    tuning_steps: int = Field(
        default=0, ge=0, description="gradient steps that tune each layer's scales and norm gains after gptq"
    )
    smooth_alpha: float | None = Field(
        default=None, ge=0, le=1, description="smoothquant's exponent for all sites; null: searched for each"
    )
    rotate: bool = Field(
        default=False, description="spread outlier channels by Hadamard rotations that fold into the weights"
    )
    scheme: WeightScheme = WeightScheme()
    head: Head = Field(default=None, description="scheme of the output head; null: float")
    embedding: Embedding = Field(default=None, description="int8 with one scale a row, or null: float")
    moe_all_experts: bool = Field(default=False, description="calibrate every expert on every token")
    clip: bool | None = Field(default=None, description="search each group's range; null: no for rtn, else yes")
    rules: tuple[Rule, ...] = ()
    preset: Preset | None = Field(default=None, description="rules for this model's layers, before the others")
    target_bits: float | None = Field(
        default=None, gt=0, le=16, description="stored bits per weight; sensitivity chooses among the candidates"
    )
    candidates: Candidates | None = Field(default=None, description="schemes to choose from, such as W4g64")
    on_misfit: Literal["error", "smaller", "skip"] = "error"
    expand_fusion_groups: bool = True
    calibration: Calibration = Calibration()
    kv_cache: KvRecipe | None = Field(default=None, description="how keys and values are cached; null: in float")
    formats: Annotated[tuple[Format, ...], BeforeValidator(_listed), Field(min_length=1)] = ("native",)

    @model_validator(mode="after")
    def _none_is_only_the_cache(self) -> "Recipe":
        if self.method != "none":
            return self
        weights = {
            "scheme.activations": self.scheme.activations,
            **{name: getattr(self, name) for name in ("rules", "preset", "target_bits", "head", "embedding", "rotate")},
        }
        asked = [name for name, value in weights.items() if value]
        if asked:
            raise ValueError(f"the method none leaves weights as they are; leave out {', '.join(asked)}")
        if self.kv_cache is None:
            raise ValueError("the method none leaves weights as they are, so there is nothing to do; add --kv-cache")
        return self

    @model_validator(mode="after")
    def _alpha_and_effort_are_used(self) -> "Recipe":
        if self.smooth_alpha is not None and self.smoothing != {"smoothquant"}:
            raise ValueError(f"smooth_alpha is for the method smoothquant, not {self.method}; leave it out")
        if self.method in ("none", "rtn") and self.effort != "balanced":
            raise ValueError(f"effort is for methods that calibrate, not for {self.method}; leave it out")
        return self

    @model_validator(mode="after")
    def _tuning_is_possible(self) -> "Recipe":
        if self.tuning_steps and (not self.feedback or self.effort == "fast"):
            raise ValueError(
                "tuning_steps are for a method with gptq at effort balanced or best, which run the float model beside; "
                "leave them out"
            )
        return self

    @property
    def smoothing(self) -> frozenset[str]:
        """Which factors between a producer and its linears are searched: `awq`, `smoothquant`, both or none."""
        return frozenset(self.method.split("+")) & {"awq", "smoothquant"}

    @property
    def feedback(self) -> bool:
        """Whether errors are fed back, site by site (`gptq`); otherwise weights are rounded each on its own."""
        return "gptq" in self.method.split("+")

    @property
    def effort_plan(self) -> EffortPlan:
        """What the effort means for the method; nothing but rounding without feedback."""
        return EFFORTS[self.effort] if self.feedback else EffortPlan(False, 0)

    @property
    def needs_calibration(self) -> bool:
        """Whether text runs through the model: for the method, for stored ranges of activations or for the KV cache."""
        cached = self.kv_cache is not None and self.kv_cache.needs_calibration
        return self.method not in ("none", "rtn") or self.needs_ranges or cached

    @property
    def needs_ranges(self) -> bool:
        """Whether any linear's input has a range that calibration measures and the files store."""
        schemes = [self.scheme, *(rule.scheme for rule in self.rules)]
        formats = [scheme.activations for scheme in schemes if isinstance(scheme, WeightScheme)]
        return any(wanted is not None and wanted.needs_range for wanted in formats)

    @property
    def clipping(self) -> bool:
        """Whether the range of each group is searched, the method's default filled in."""
        return self.method not in ("none", "rtn") if self.clip is None else self.clip

    def to_json(self) -> str:
        """The document as indented JSON."""
        return json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False)


def load_recipe(path: Path) -> Recipe:
    """A recipe from a YAML or JSON file.

    Raises UsageError naming the file, the field and what is wrong with it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"recipe {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"recipe {path} is not UTF-8 text (byte {error.start})") from error
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"recipe {path} is not valid YAML or JSON: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise UsageError(f"recipe {path} must be a mapping of fields such as method: awq")
    return validate_recipe(document, f"recipe {path}")


def validate_recipe(document: dict[str, Any], origin: str) -> Recipe:
    """A recipe from plain values; `origin` (a file, "the command line") opens the error message.

    Raises UsageError naming the first field that is wrong.
    """
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        got = "" if isinstance(first["input"], dict) else f" (got {str(first['input'])[:80]!r})"
        place = f"field {field}: " if field else ""
        raise UsageError(f"{origin}: {place}{message}{got}") from error
