"""Quantized sources that this version cannot read, refused by name with what to do instead.

Their weights are coded by tables or kernels of their own libraries, so that nothing but those can decode them. A source
is known by its `quant_method`, or by the tensors that only such a library writes.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cann_llm_quant.checkpoint.source_quant import quantization_method
from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.shown import shown, shown_name

# `quant_method` to the name that people know, and what its weights are.
METHODS: Mapping[str, tuple[str, str]] = {
    "bitsandbytes": ("bitsandbytes", "NF4, FP4 or LLM.int8 codes"),
    "bitsandbytes_4bit": ("bitsandbytes", "NF4 or FP4 codes"),
    "bitsandbytes_8bit": ("bitsandbytes", "LLM.int8 codes"),
    "aqlm": ("AQLM", "sums of codebook entries"),
    "hqq": ("HQQ", "codes in HQQ's own packing"),
    "eetq": ("EETQ", "codes in a GPU kernel's order"),
    "torchao": ("torchao", "tensor subclasses"),
    "quip": ("QuIP#", "lattice codes"),
    "quanto": ("quanto", "codes in quanto's own packing"),
    "vptq": ("VPTQ", "vector codes"),
    "spqr": ("SpQR", "codes beside sparse outliers"),
    "higgs": ("HIGGS", "grid codes"),
    "fp_quant": ("FP-Quant", "rotated FP4 codes"),
    "bitnet": ("BitNet", "ternary codes"),
    "mxfp4": ("the MXFP4 layout of gpt-oss", "stacks of experts in blocks"),
    "modelopt": ("ModelOpt", "codes in ModelOpt's layout"),
}
_TENSORS = {
    ".SCB": "bitsandbytes_8bit",
    ".weight.absmax": "bitsandbytes_4bit",
    ".weight.quant_map": "bitsandbytes_4bit",
    ".weight_blocks": "mxfp4",
}


def refuse_unreadable(path: Path, config: Mapping[str, Any], names: Iterable[str]) -> None:
    """UnsupportedError when config or tensor names tell that the source is in one of these forms."""
    method = (quantization_method(config) or "").lower()
    evidence = "" if method in METHODS else next((n for n in names if n.endswith(tuple(_TENSORS))), "")
    if evidence:
        method = next(method for suffix, method in _TENSORS.items() if evidence.endswith(suffix))
    if method not in METHODS:
        return
    library, content = METHODS[method]
    seen = f"tensor {shown_name(evidence)}" if evidence else f"quant_method {shown(method)}"
    raise UnsupportedError(
        f"{path} was quantized by {library} ({seen}): its weights are {content}, which this version does not decode; "
        "give the float model that it was made from, or load it in transformers, call model.dequantize() and save that"
    )
