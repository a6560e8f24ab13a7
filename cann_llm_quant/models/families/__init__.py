"""The model families: one file of data each. A new file in this folder is found by itself; nothing else changes."""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from cann_llm_quant.models.layer_map import Family


@cache
def known_families() -> Mapping[str, Family]:
    """Every family of this folder by `model_type`, in alphabetical order."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    found = [importlib.import_module(f"{__name__}.{name}").FAMILY for name in modules]
    return MappingProxyType({family.model_type: family for family in found})
