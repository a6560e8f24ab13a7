"""What formats of keys and values cost a model, layer by layer, as a document: JSON with a schema version."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from cann_llm_quant.kv_recipe import Side
from cann_llm_quant.pipeline.sensitivity_file import Damage, Document, load_document

Schema = Literal["cann-llm-quant/kv-sensitivity/1"]

RULES = ("page_size", "sink_tokens", "recent_tokens", "sensitive", "headroom", "percentile")
"""Fields of a recipe's KV cache that a measurement depends on, besides the candidates."""


class FormatDamage(Document):
    """K or V of one layer in one format: stored bits per value, scales included, and KL in nats per token.

    `error` is how far the attention's contribution to the residual stream moves, relative to its size (squared norms),
    `measured` the true KL with only this side of this layer quantized (null: not measured), `damage` what the choice is
    made by: the measured KL, else that of the measured format whose error is nearest, times the ratio of the errors.
    """

    bits: float = Field(gt=0)
    error: Damage
    measured: Damage | None
    damage: Damage


class SideEntry(Document):
    """K or V of one layer; `formats` by label, in the order of the candidates."""

    layer: int
    side: Side
    formats: dict[str, FormatDamage]


class KvSettings(Document):
    """What the numbers depend on; `scale_windows` of the calibration's windows gave static scales, others were judged.

    `sensitive_ids` counts the tokens whose pages stay in float.
    """

    candidates: tuple[str, ...]
    page_size: int
    sink_tokens: int
    recent_tokens: int
    sensitive: tuple[str, ...]
    headroom: float
    percentile: float
    scale_windows: int
    judged_windows: int
    dtype: str
    device: str
    seed: int
    calibration: dict[str, Any]


class KvSensitivity(Document):
    """The whole measurement."""

    schema_version: Schema = Field(default="cann-llm-quant/kv-sensitivity/1", alias="schema")
    tool_version: str
    model: str
    fingerprint: str
    settings: KvSettings
    sides: tuple[SideEntry, ...]


class JointDamage(Document):
    """A SPEC for the whole cache: its stored bits per value, the KL that the damages of its layers and sides sum up to,
    and the KL of the model with all of it in place, both in nats per token.
    """

    spec: str
    bits: float
    predicted_kl: Damage
    measured_kl: Damage


class KvChoiceReport(JointDamage):
    """What `auto` chose within the budget; what else was measured as a whole, the mix of least predicted KL first; and
    the measurement of single layers and sides.
    """

    bits_wanted: float
    compared: tuple[JointDamage, ...]
    sensitivity: KvSensitivity


def load_kv_sensitivity(path: Path) -> KvSensitivity:
    """Read a document back. Raises UsageError naming the file and the first field that is wrong."""
    return load_document(KvSensitivity, path, "measure again with cann-llm-quant sensitivity --kv-cache")
