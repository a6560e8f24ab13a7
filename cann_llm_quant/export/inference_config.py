"""`inference_config.json`: what the runner, and a reader who audits a model, needs to know of an output directory.

The JSON schema of this document ships in the package (`data/inference_config.schema.json`) and is generated from these
classes; a test fails when they differ.
"""

import json
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.export.kv_section import KvCache
from cann_llm_quant.export.native import Layout
from cann_llm_quant.quant.scheme import (
    ActivationScheme,
    ActivationStrategy,
    ActivationType,
    ScaleType,
    Scheme,
    Strategy,
    WeightType,
)
from cann_llm_quant.shown import shown, shown_name

FILE_NAME = "inference_config.json"
StoredLayout = Layout | Literal["mixed-precision", "dense"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class WeightFormat(_Section):
    """One weight scheme: `w ~ (value(code) - zero_point) * scale`.

    Codes of floats are numbers of 8 bits (fp8_e4m3) or 4 (fp4_e2m1). Scales of the type e8m0 are powers of two; those
    of the type e4m3 are divided by one float32 number of the matrix.
    """

    dtype: WeightType
    symmetric: bool
    strategy: Strategy
    group_size: int | None
    scale_type: ScaleType = "float"
    scale_dtype: Literal["bfloat16", "float16", "float32", "float8_e8m0fnu", "float8_e4m3fn"]

    @classmethod
    def of(cls, scheme: Scheme, scale_dtype: str) -> "WeightFormat":
        """For a scheme; `scale_dtype` is what its scales were found to fit in, where the scheme leaves that open."""
        stored = {"e8m0": "float8_e8m0fnu", "e4m3": "float8_e4m3fn"}.get(scheme.scale_type, scale_dtype)
        return cls.model_validate({**asdict(scheme), "scale_dtype": stored})

    def scheme(self) -> Scheme:
        """The scheme as a value. Raises UsageError when its parts contradict each other."""
        return Scheme(self.dtype, self.symmetric, self.strategy, self.group_size, self.scale_type)

    def key(self) -> str:
        """A name for this format that no other one has."""
        label = self.scheme().label()
        return label if self.scale_type != "float" else f"{label}-{self.scale_dtype}"


class Weights(_Section):
    """How the matrices are stored.

    `linears` maps a module to a key of `schemes`, `float` names the others with the reason. `tied` modules have no
    matrix of their own and read another module's.
    """

    layout: StoredLayout = "pack-quantized"
    schemes: dict[str, WeightFormat]
    linears: dict[str, str]
    float_: dict[str, str] = Field(alias="float")
    tied: dict[str, str] = Field(default_factory=dict)
    bits_per_weight: float | None = Field(
        description="stored bits per quantized weight, scales and zero points included; null where none is quantized"
    )

    @model_validator(mode="after")
    def _schemes_exist(self) -> "Weights":
        for module, key in self.linears.items():
            if key not in self.schemes:
                raise ValueError(f"{module} has scheme {key}, which is not among the schemes")
        return self


class InputFormat(_Section):
    """How inputs of linears are quantized: ranges of each input (`dynamic`), or the stored `input_scale`."""

    dtype: ActivationType
    symmetric: bool
    dynamic: bool
    strategy: ActivationStrategy
    group_size: int | None = None

    @classmethod
    def of(cls, scheme: ActivationScheme) -> "InputFormat":
        """For a scheme."""
        return cls.model_validate(asdict(scheme))

    def scheme(self) -> ActivationScheme:
        """The scheme as a value. Raises UsageError when its parts contradict each other."""
        return ActivationScheme(self.dtype, self.symmetric, self.dynamic, self.strategy, self.group_size)


class Inputs(_Section):
    """Linears whose inputs are quantized: a module to a key of `schemes`; inputs of the others stay in float."""

    schemes: dict[str, InputFormat] = Field(default_factory=dict)
    linears: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _schemes_exist(self) -> "Inputs":
        for module, key in self.linears.items():
            if key not in self.schemes:
                raise ValueError(f"{module} has input scheme {key}, which is not among the schemes")
        return self


class Limits(_Section):
    """Bounds that a server must respect."""

    max_context: int = Field(description="positions the model can address, rope scaling included")


class Accounting(_Section):
    """Every tensor of the source: `source = quantized + kept + dropped`; dropped ones by name with the reason."""

    source: int
    quantized: int
    kept: int
    dropped: dict[str, str]
    extra: list[str] = Field(description="kept tensors that the decoder does not read")


class Provenance(_Section):
    """Where the numbers come from; enough to repeat the run."""

    tool_version: str
    source_name: str
    source_fingerprint: str
    recipe: dict[str, Any]
    compute_dtype: str
    device: str
    calibration: dict[str, Any] | None
    libraries: dict[str, str]


class LinearReport(_Section):
    """Relative output error of one linear: plain rounding's, and beside it the method's.

    Both are `tr(ΔW H ΔWᵀ) / tr(W H Wᵀ)` plus, where the input is quantized, `|ΔX Wᵀ|² / |X Wᵀ|²` on rows of it; plain
    rounding's without any factor folded, the method's as it is stored. Null where no text was read.
    """

    rtn_error: float | None
    error: float | None
    tokens: int | None = Field(description="calibration tokens that its input was measured on")
    borrowed: int = Field(default=0, description="tokens' worth of other experts' input that joined the measured ones")
    routed: int | None = Field(default=None, description="tokens that the router sent to the linear's expert")


class InferenceConfig(_Section):
    """The whole document."""

    format_version: Literal[1] = 1
    model_type: str
    weights: Weights
    inputs: Inputs = Inputs()
    kv_cache: KvCache = KvCache()
    limits: Limits
    accounting: Accounting
    provenance: Provenance
    linears: dict[str, LinearReport] = Field(description="errors measured during quantization")
    results: dict[str, Any] = Field(default_factory=dict, description="evaluation results added later")

    def scheme_of(self, module: str) -> Scheme | None:
        """The weight scheme of a linear, None when it is stored in float."""
        key = self.weights.linears.get(module)
        return None if key is None else self.weights.schemes[key].scheme()

    def activations_of(self, module: str) -> ActivationScheme | None:
        """How the input of a linear is quantized, None when it stays in float."""
        key = self.inputs.linears.get(module)
        return None if key is None else self.inputs.schemes[key].scheme()

    def to_json(self) -> bytes:
        """The document as UTF-8 JSON, stable key order."""
        return (self.model_dump_json(by_alias=True, indent=2) + "\n").encode()


def load_inference_config(folder: Path) -> InferenceConfig:
    """The document of an output directory.

    Raises CheckpointError when it is absent, not JSON, of another format version, or breaks the schema.
    """
    path = folder / FILE_NAME
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {FILE_NAME}; it was not written by cann-llm-quant quantize") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != 1:
        raise CheckpointError(
            f"{path} has format version {shown(version)}; this version of cann-llm-quant reads version 1"
        )
    try:
        return InferenceConfig.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path}: field {shown_name(field)}: {shown_name(first['msg'])}") from error


def schema() -> dict[str, Any]:
    """The JSON schema of the document."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **InferenceConfig.model_json_schema(by_alias=True),
    }


def shipped_schema() -> dict[str, Any]:
    """The JSON schema as it lies in the package."""
    text = files("cann_llm_quant").joinpath("data/inference_config.schema.json").read_text(encoding="utf-8")
    result: dict[str, Any] = json.loads(text)
    return result
