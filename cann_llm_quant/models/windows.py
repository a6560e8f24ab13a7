"""The rules by which families spread a sliding window over their layers: `(config, layer index) -> window | None`.

A window of n lets a token see itself and the n - 1 tokens before it.
"""

from collections.abc import Callable

from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.models.config_fields import ConfigFields


def window_everywhere(default: int | None) -> Callable[[ConfigFields, int], int | None]:
    """`sliding_window` in every layer: null means none, an absent field means `default`."""

    def window(fields: ConfigFields, index: int) -> int | None:
        if "sliding_window" not in fields.values:
            return default
        return fields.optional_integer("sliding_window")

    return window


def window_if_used(fields: ConfigFields, index: int) -> int | None:
    """`sliding_window` in every layer when `use_sliding_window` is on."""
    return fields.optional_integer("sliding_window") if fields.flag("use_sliding_window") else None


def window_of_upper_layers(fields: ConfigFields, index: int) -> int | None:
    """`layer_types` where the config lists them, else the layers from `max_window_layers` on."""
    return _window(fields, index, index >= fields.integer("max_window_layers", default=28, minimum=0))


def window_of_even_layers(fields: ConfigFields, index: int) -> int | None:
    """`layer_types` where the config lists them, else every other layer below `max_window_layers`."""
    below = index < fields.integer("max_window_layers", default=28, minimum=0)
    return _window(fields, index, index % 2 == 0 and below)


def _window(fields: ConfigFields, index: int, windowed: bool) -> int | None:
    types = fields.items("layer_types")
    if not fields.flag("use_sliding_window"):
        return None
    if types:
        if index >= len(types):
            raise CheckpointError(
                f"{fields.where}: layer_types names {len(types)} layers, but there is a layer {index}"
            )
        windowed = types[index] == "sliding_attention"
    return fields.optional_integer("sliding_window") if windowed else None
