"""Whether a compressed-tensors section is true of the tensors beside it, as far as our readers do not need it to be.

They take the form of a linear from its tensors. Runtimes take it from `quant_method` and from each group's `format`,
build their parameters by it, and then miss those that are stored.
"""

from collections.abc import Mapping
from typing import Any

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.export.compressed_tensors_config import SECTION_NAMES, compressed_tensors_config
from cann_llm_quant.export.compressed_tensors_reader import CompressedTensorsReader
from cann_llm_quant.export.native_reader import NativeReader
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.export.verify_findings import Findings, listed
from cann_llm_quant.quant.scheme import Scheme
from cann_llm_quant.shown import shown

METHOD = "compressed-tensors"
_ADVICE = "runtimes follow the config; write the model again"


def check_section(checkpoint: PackedCheckpoint[Any], findings: Findings) -> None:
    """The section's method, and the form that it gives every linear; nothing of other layouts."""
    reader, inner = checkpoint.reader, checkpoint.inner
    if not isinstance(reader, NativeReader | CompressedTensorsReader) or not reader.linears:
        return
    where = f"{inner.path}/config.json"
    section = next((inner.config[name] for name in SECTION_NAMES if inner.config.get(name) is not None), None)
    if section is None:
        what = f"has no quantization_config, but {len(reader.linears)} linears are stored in codes"
        findings.add(where, what, _ADVICE)
        return
    method = section.get("quant_method", METHOD) if isinstance(section, Mapping) else METHOD
    if method != METHOD:
        findings.add(where, f"quant_method is {shown(method)}, but tensors are those of {METHOD}", _ADVICE)
        return
    with findings.caught(where):
        config = compressed_tensors_config(inner.config, where)
        wrong: dict[str, list[str]] = {}
        for module, linear in reader.linears.items():
            group = config.group_of(module, "Embedding" if module.endswith("embed_tokens") else "Linear")
            forms = _forms(inner, module, linear.scheme)
            if group is not None and group.layout is not None and group.layout not in forms:
                text = f"{group.name} has format {group.layout}, but tensors are {forms[0]}"
                wrong.setdefault(text, []).append(module)
        for text, modules in wrong.items():
            findings.add(where, f"{text}: {listed(modules)}", _ADVICE)


def _forms(inner: Checkpoint, module: str, scheme: Scheme) -> tuple[str, ...]:
    """The formats that name what is stored of a linear, the usual one first."""
    if scheme.is_integer:
        packed = f"{module}.weight_packed" in inner.tensors
        return ("pack-quantized",) if packed else ("int-quantized", "naive-quantized")
    if scheme.scale_type == "float":
        return "float-quantized", "naive-quantized"
    if scheme.bits == 8:
        return "mxfp8-quantized", "float-quantized", "naive-quantized"
    return ("nvfp4-pack-quantized",) if scheme.scale_type == "e4m3" else ("mxfp4-pack-quantized",)
