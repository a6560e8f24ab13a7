"""The layouts of families that fuse or rename: one table each. A new file in this folder is found by itself."""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from cann_llm_quant.checkpoint.fused_layout import FusedLayout


@cache
def known_layouts() -> Mapping[str, FusedLayout]:
    """Every layout of this folder by `model_type`, in alphabetical order."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    found = [importlib.import_module(f"{__name__}.{name}").LAYOUT for name in modules]
    return MappingProxyType({layout.model_type: layout for layout in found})
