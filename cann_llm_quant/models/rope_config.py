"""Rotary settings of a `config.json`, in both of its spellings, to one `Rope`.

New form (transformers 5)   rope_parameters: {rope_type, rope_theta, factor, ...}
Old form                    rope_theta: 500000, rope_scaling: {type | rope_type, factor, ...} or null

Both may be there (exporters write both so that old and new readers agree); then they must say the same, because the
readers that look at only one of them would otherwise compute different models.
"""

from typing import Any, get_args

from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.models.arch import Rope, RopeKind
from cann_llm_quant.models.config_fields import ConfigFields
from cann_llm_quant.shown import shown

KINDS: tuple[RopeKind, ...] = get_args(RopeKind)
_REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_NUMBERS = (
    *("factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
)
# transformers reads these with `or default`
_ZERO_IS_ABSENT = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def rope_from_config(
    fields: ConfigFields, default_theta: float, max_positions: int, *, partial_rotary: bool = False
) -> Rope:
    """The rotary embedding that a config describes; `max_positions` is its `max_position_embeddings`.

    Raises CheckpointError for contradictory or incomplete fields, UnsupportedError for an unknown kind, or a
    `partial_rotary_factor` that is not 1 where the family turns whole heads (`partial_rotary` false).
    """
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    for section in (new, old):
        if section is not None and any(isinstance(value, dict) for value in section.values.values()):
            raise UnsupportedError(f"{section.where} differs by layer type, which this version does not support")
    said = [_settings(section) for section in (new, old) if section is not None and section.values]
    if fields.given("rope_theta"):
        said.append({"rope_theta": fields.number("rope_theta")})
    for name in ("partial_rotary_factor", "original_max_position_embeddings"):
        if fields.given(name):
            said.append({name: fields.number(name)})
    settings = _merge(said, fields.where)
    _check_partial(settings.get("partial_rotary_factor", 1.0), partial_rotary, fields.where)
    kind = settings.pop("rope_type", "default")
    theta = settings.pop("rope_theta", default_theta)
    return Rope(theta, kind, _completed(kind, settings, max_positions, fields.where), max_positions)


def scaled_positions(rope: Rope) -> int:
    """Number of positions that the scaling reaches, from the number that the config gives.

    `linear` and `dynamic` configs keep the unscaled number, `llama3` ones give the scaled number; `yarn` ones do
    either, told apart by `original_max_position_embeddings`.
    """
    said, parameters = rope.trained_positions, rope.parameters
    if rope.kind in ("linear", "dynamic"):
        return int(said * parameters["factor"])
    if rope.kind == "yarn":
        return max(said, int(parameters["original_max_position_embeddings"] * parameters["factor"]))
    return said


def _settings(section: ConfigFields) -> dict[str, Any]:
    """One section's fields, checked, with the kind under its new name `rope_type`."""
    settings: dict[str, Any] = {
        name: value
        for name, value in section.values.items()
        if value is not None and not (name in _ZERO_IS_ABSENT and value == 0)
    }
    kind = settings.pop("rope_type", None)
    older = settings.pop("type", None)
    if kind is not None and older is not None and kind != older:
        raise CheckpointError(
            f"{section.where}: rope_type={shown(kind)} contradicts type={shown(older)}; remove one of them"
        )
    kind = kind or older or "default"
    if kind not in KINDS:
        raise UnsupportedError(
            f"{section.where}: rotary kind {shown(kind)} is not supported; known are {', '.join(KINDS)}"
        )
    for name in (*_NUMBERS, "rope_theta"):
        if name in settings:
            settings[name] = section.number(name)
    if "original_max_position_embeddings" in settings:
        settings["original_max_position_embeddings"] = section.integer("original_max_position_embeddings")
    return {"rope_type": kind, **settings}


def _merge(said: list[dict[str, Any]], where: str) -> dict[str, Any]:
    """All settings together; an error when two places give one of them different values."""
    merged: dict[str, Any] = {}
    for settings in said:
        for name, value in settings.items():
            if name in merged and merged[name] != value:
                raise CheckpointError(
                    f"{where}: {name}={shown(merged[name])} in rope_parameters contradicts {shown(value)} in the older "
                    "rope_theta/rope_scaling fields; keep the right one"
                )
            merged[name] = value
    return merged


def _check_partial(factor: float, partial_rotary: bool, where: str) -> None:
    """Readers of families that turn whole heads ignore the field or fail on it: no meaning is safe but 1."""
    if not partial_rotary and factor != 1:
        raise UnsupportedError(
            f"{where}: partial_rotary_factor={shown(factor)}, but this model type turns whole heads; remove the "
            "field if the model was trained so"
        )
    if factor > 1:
        raise CheckpointError(f"{where}: partial_rotary_factor={shown(factor)} must be at most 1")


def _completed(kind: str, settings: dict[str, Any], max_positions: int, where: str) -> dict[str, Any]:
    """The kind's parameters with what the format derives from `max_position_embeddings` filled in."""
    missing = [name for name in _REQUIRED.get(kind, ()) if name not in settings]
    if missing:
        raise CheckpointError(f"{where}: rotary kind {shown(kind)} needs {', '.join(missing)}")
    if kind in ("yarn", "llama3"):
        original = int(settings.get("original_max_position_embeddings", max_positions))
        settings["original_max_position_embeddings"] = original
        settings.setdefault("factor", max_positions / original)
    if kind == "llama3" and settings["low_freq_factor"] == settings["high_freq_factor"]:
        raise CheckpointError(f"{where}: low_freq_factor and high_freq_factor are equal; they must differ")
    return settings
