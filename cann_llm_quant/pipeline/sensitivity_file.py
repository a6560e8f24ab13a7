"""The result of a sensitivity measurement as a document: JSON with a schema version, written and read back here."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cann_llm_quant.errors import UsageError

Schema = Literal["cann-llm-quant/sensitivity/1"]

Damage = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Document(BaseModel):
    """A part of such a file, or the whole."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def document(self) -> dict[str, Any]:
        """Plain JSON values."""
        return self.model_dump(mode="json", by_alias=True)


Kind = TypeVar("Kind", bound=Document)


class ChoiceDamage(Document):
    """One unit under one scheme: stored bits in all, and KL in nats per token.

    `estimate` is of second order, `measured` the true KL with only this unit quantized (null: not measured), `damage`
    what allocation uses: the measured value, else the estimate times the unit's or the kind's correction.
    """

    bits: int = Field(gt=0)
    estimate: Damage
    measured: Damage | None
    damage: Damage


class UnitEntry(Document):
    """Linears that share a scheme; `choices` by scheme name, in the order of the candidates."""

    name: str
    layer: int
    kind: str
    modules: tuple[str, ...]
    weights: int = Field(gt=0)
    float_bits: int = Field(gt=0)
    choices: dict[str, ChoiceDamage]


class LayerEntry(Document):
    """One layer: its units' damage under the first candidate, and what it does to the residual stream.

    `cosine` between the layer's input and output, `change` is |output - input| / |input|; means over tokens.
    """

    index: int
    damage: Damage
    cosine: float
    change: float


class Agreement(Document):
    """How the estimates stood against measurements, before correction: rank and log-log correlation.

    Null with fewer than three measured units. `corrections` multiply the estimates, by kind of unit.
    """

    measured: int
    rank_correlation: float | None
    log_correlation: float | None
    corrections: dict[str, float]


class Settings(Document):
    """What the numbers depend on."""

    candidates: tuple[str, ...]
    solver: Literal["feedback", "rounding"]
    dtype: str
    device: str
    seed: int
    measured_windows: int
    calibration: dict[str, Any]


class Sensitivity(Document):
    """The whole measurement."""

    schema_version: Schema = Field(default="cann-llm-quant/sensitivity/1", alias="schema")
    tool_version: str
    model: str
    fingerprint: str
    settings: Settings
    agreement: Agreement
    units: tuple[UnitEntry, ...]
    layers: tuple[LayerEntry, ...]


def save_sensitivity(sensitivity: Document, path: Path) -> None:
    """Write the document. Raises UsageError when the file cannot be written."""
    try:
        path.write_text(json.dumps(sensitivity.document(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def load_sensitivity(path: Path) -> Sensitivity:
    """Read a document back.

    Raises UsageError naming the file and the first field that is wrong.
    """
    return load_document(Sensitivity, path, "measure again with cann-llm-quant sensitivity")


def load_document(kind: type[Kind], path: Path, again: str) -> Kind:
    """Read a document of a kind back; `again` says how to get a good one. Raises UsageError as `load_sensitivity`."""
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"sensitivity file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"sensitivity file {path} is not UTF-8 text (byte {error.start})") from error
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "document"
        raise UsageError(f"sensitivity file {path}: field {field}: {first['msg']}; {again}") from error
