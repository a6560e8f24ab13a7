"""The section `kv_cache` of `inference_config.json`: in what keys and values are stored, layer by layer.

q = round(x/s) + z        x = (q - z) * s        z whole, 0 where it is not stored; fp8: the nearest number, no z
"""

from dataclasses import asdict
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cann_llm_quant.quant.kv import KvScheme, KvStrategy, KvType, LayerKv

SCALES_FILE: Final = "kv_cache/scales.safetensors"
ScalesPlace = Literal["model", "kv_cache/scales.safetensors"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class KvFormat(_Section):
    """A number format of keys or values; `dynamic` scales are taken from each page, others are stored."""

    dtype: KvType
    symmetric: bool = True
    strategy: KvStrategy = "tensor"
    group_size: int | None = None
    dynamic: bool = False

    @classmethod
    def of(cls, scheme: KvScheme) -> "KvFormat":
        """For a scheme."""
        return cls.model_validate(asdict(scheme))

    def scheme(self) -> KvScheme:
        """The scheme as a value. Raises UsageError when its parts contradict each other."""
        return KvScheme(**self.model_dump())


class KvLayer(_Section):
    """What the keys and the values of one layer are stored in: keys of `schemes`; null is the compute dtype."""

    k: str | None = None
    v: str | None = None


class KvMeasured(_Section):
    """What calibration saw of the keys or values of one layer under stored scales."""

    largest: float = Field(description="largest magnitude")
    clipped: float = Field(description="share of all values that the scales do not reach")


class KvLayerReport(_Section):
    """Measurements of one layer; null where no scale is stored or none was measured."""

    k: KvMeasured | None = None
    v: KvMeasured | None = None
    tokens: int | None = Field(default=None, description="calibration tokens that were seen")
    smoothed: float | None = Field(
        default=None, description="how much closer K's channels came: largest over smallest factor folded into q and k"
    )


class KvCache(_Section):
    """How the runner stores keys and values. Without layers all are in the type that it computes in."""

    dtype: Literal["compute"] = Field(default="compute", description="the type of layers and pages without a scheme")
    convention: Literal["q = round(x/s) + z, x = (q - z) * s"] = "q = round(x/s) + z, x = (q - z) * s"
    schemes: dict[str, KvFormat] = Field(default_factory=dict)
    layers: list[KvLayer] = Field(default_factory=list)
    scales: ScalesPlace | None = Field(
        default=None,
        description="where stored scales lie: k_scale and v_scale beside the weights, or a file of their own",
    )
    given_scale: float | None = Field(default=None, description="a scale that was given instead of measured")
    page_size: Literal[16, 32, 128] = Field(default=32, description="tokens of a page, as was decided on")
    sink_tokens: int = Field(default=0, ge=0, description="first tokens of a text whose pages keep the compute dtype")
    recent_tokens: int = Field(default=0, ge=0, description="latest tokens whose pages keep the compute dtype")
    sensitive: list[Literal["numbers", "names"]] = Field(
        default_factory=list, description="classes of tokens whose pages keep the compute dtype"
    )
    report: list[KvLayerReport] = Field(default_factory=list)

    @model_validator(mode="after")
    def _schemes_exist(self) -> "KvCache":
        for number, layer in enumerate(self.layers):
            for key in (layer.k, layer.v):
                if key is not None and key not in self.schemes:
                    raise ValueError(f"layer {number} has KV scheme {key}, which is not among the schemes")
        return self

    def layer_schemes(self) -> tuple[LayerKv, ...]:
        """The layers' schemes as values; empty without layers. Raises UsageError as `KvFormat.scheme`."""
        schemes = {key: one.scheme() for key, one in self.schemes.items()}
        return tuple(
            LayerKv(*(None if key is None else schemes[key] for key in (layer.k, layer.v))) for layer in self.layers
        )
