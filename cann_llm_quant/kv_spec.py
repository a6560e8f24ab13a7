"""From what a user writes of the KV cache to the schemes of a model's layers; kv_recipe.py has the grammar."""

from collections.abc import Iterable
from dataclasses import asdict

from cann_llm_quant.kv_recipe import KvFormat, KvPair, KvRecipe, parse_rules
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.quant.kv import KvScheme, LayerKv


def parse_kv_spec(text: str, num_layers: int) -> tuple[LayerKv, ...]:
    """Schemes of each layer. Raises UsageError that names the part of `text` which is wrong."""
    return _schemes(parse_rules(text).layers(num_layers))


def kv_schemes(wanted: KvRecipe, arch: Arch) -> tuple[LayerKv, ...]:
    """The schemes of a model's layers that a recipe asks for.

    Raises UsageError for layers that the model does not have and groups that do not divide its heads.
    """
    layers = _schemes(wanted.spec.layers(arch.num_layers))
    for layer in layers:
        for scheme in (layer.k, layer.v):
            if scheme is not None:
                scheme.check(arch.head_dim)
    return layers


def _schemes(pairs: Iterable[KvPair]) -> tuple[LayerKv, ...]:
    return tuple(LayerKv(_scheme(pair.k), _scheme(pair.v)) for pair in pairs)


def _scheme(wanted: KvFormat | None) -> KvScheme | None:
    return None if wanted is None else KvScheme(**asdict(wanted))
