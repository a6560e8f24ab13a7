"""Whether the config of a GPTQ, AWQ or AutoRound folder is true of its tensors.

Our readers take widths and groups from the shapes. Runtimes take them from the config, allocate by it, and then fail
on another shape or, where `desc_act` is false, leave `g_idx` unread in silence.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.checkpoint.files import file_names, parse_json_object, read_bytes
from cann_llm_quant.export.auto_round_config import FLOAT_BITS, METHOD, OLD_METHOD, AutoRoundConfig
from cann_llm_quant.export.foreign_patterns import foreign_pattern
from cann_llm_quant.export.layout import StoredLinear
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.export.verify_findings import Findings, listed
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.models.config_fields import ConfigFields
from cann_llm_quant.quant.ranges import SCALE_DTYPES
from cann_llm_quant.shown import shown

_SIDE_FILES = ("quantize_config.json", "quant_config.json")
_SIDE_FIELDS = (("bits", "w_bit"), ("group_size", "q_group_size"), ("desc_act",), ("sym",), ("zero_point",))
_ADVICE_BOTH = "one of the files is stale; runtimes differ in which they read"
_ADVICE = "one of the two is wrong; runtimes follow the config"


def check_weight_only(checkpoint: PackedCheckpoint[Any], arch: Arch, findings: Findings) -> None:
    """The section against every linear; nothing for other layouts, or where only older side files say something."""
    layout, inner = checkpoint.reader.layout, checkpoint.inner
    where = f"{inner.path}/config.json"
    with findings.caught(where):
        section = ConfigFields(inner.config, where).section("quantization_config")
        if section is None:
            return
        _check_side_files(section, inner.path, findings)
        if layout in ("gptq", "gptq_v2", "awq") and section.values.get("quant_method") in (METHOD, OLD_METHOD):
            _check_auto_round(section, inner, checkpoint.reader.linears, arch, findings)
        elif layout in ("gptq", "gptq_v2"):
            _check_gptq(section, checkpoint.reader.linears, findings)
        elif layout == "awq":
            _check_awq(section, inner, checkpoint.reader.linears, arch, findings)


def _check_side_files(section: ConfigFields, folder: Path, findings: Findings) -> None:
    """Older files that say the same; what each leaves out is no contradiction."""
    for path in (folder / name for name in file_names(folder) if name in _SIDE_FILES):
        document = parse_json_object(read_bytes(path), path)
        for name, *older in _SIDE_FIELDS:
            said = next((document[key] for key in (name, *older) if document.get(key) is not None), None)
            own = next((section.values[key] for key in (name, *older) if section.values.get(key) is not None), None)
            if said is not None and own is not None and said != own:
                findings.add(str(path), f"says {name}={shown(said)}, config.json {shown(own)}", _ADVICE_BOTH)


def _check_gptq(section: ConfigFields, linears: Mapping[str, StoredLinear], findings: Findings) -> None:
    dynamic = section.section("dynamic")
    values: Mapping[str, Any] = {} if dynamic is None else dynamic.values
    where = f"{section.where}.dynamic"
    overrides = [(text, foreign_pattern(text.removeprefix("-:").removeprefix("+:"), where)) for text in values]
    in_float, wrong, scattered = [], [], []
    for module, linear in linears.items():
        text = next((text for text, pattern in overrides if pattern.match(module)), None)
        if text is not None and text.startswith("-:"):
            in_float.append(module)
            continue
        own = ConfigFields({} if text is None else values[text], where)
        bits = own.optional_integer("bits") or section.optional_integer("bits")
        size = own.optional_integer("group_size", minimum=-1) or section.optional_integer("group_size", minimum=-1)
        if bits not in (None, linear.scheme.bits) or not _fits(size, linear):
            wrong.append(f"{module} ({linear.scheme.label()})")
        if linear.scattered and own.flag("desc_act", section.flag("desc_act", True)) is False:
            scattered.append(module)
    _add(section, in_float, "dynamic leaves in float linears that are stored in codes", findings)
    _add(section, wrong, "bits or group_size are not those of the tensors of", findings)
    _add(section, scattered, "desc_act is false, but g_idx scatters the columns of", findings)


def _check_auto_round(
    section: ConfigFields, inner: Checkpoint, linears: Mapping[str, StoredLinear], arch: Arch, findings: Findings
) -> None:
    config = AutoRoundConfig.of(inner)
    in_float = [module for module in linears if (config.bits(module) or 0) >= FLOAT_BITS]
    wrong = [
        f"{module} ({linear.scheme.label()})"
        for module, linear in linears.items()
        if module not in in_float
        and (config.bits(module) not in (None, linear.scheme.bits) or not _fits(config.group_size(module), linear))
    ]
    _add(section, in_float, "extra_config leaves in float linears that are stored in codes", findings)
    _add(section, wrong, "bits or group_size are not those of the tensors of", findings)
    blocks = section.values.get("block_name_to_quantize")
    starts = tuple(name.strip() for name in blocks.split(",")) if isinstance(blocks, str) else ("",)
    floats = [s.module for layer in arch.layers for s in layer.linears if s.quantizable and s.module.startswith(starts)]
    floats += [module for module in config.named if module not in floats]
    unnamed = [m for m in floats if _is_float(inner, m) and (config.bits(m) or 0) < FLOAT_BITS]
    _add(section, unnamed, "bits are said of linears that are stored in float", findings)


def _fits(size: int | None, linear: StoredLinear) -> bool:
    """Whether groups of `size` (-1: a row) are the stored ones; a last group that is shorter is not looked at."""
    columns, own = linear.shape[1], linear.scheme.group_size
    if size is None or (size > 0 and columns % size and size < columns):
        return True
    return (own or columns) == (columns if size == -1 else min(size, columns))


def _check_awq(
    section: ConfigFields, inner: Checkpoint, linears: Mapping[str, StoredLinear], arch: Arch, findings: Findings
) -> None:
    asymmetric = [module for module, linear in linears.items() if not linear.scheme.symmetric]
    if section.optional_flag("zero_point") is False:
        _add(section, asymmetric, "zero_point is false, but zero points other than the middle are stored of", findings)
    names = [name for name in section.items("modules_to_not_convert") if isinstance(name, str)]
    kept = [m for m in linears if any(name == m or f".{m}.".find(f".{name}.") >= 0 for name in names)]
    _add(section, kept, "modules_to_not_convert names linears that are stored in codes", findings)
    floats = (spec.module for layer in arch.layers for spec in layer.linears if spec.quantizable)
    unnamed = [m for m in floats if _is_float(inner, m) and not any(name in m for name in names)]
    _add(section, unnamed, "modules_to_not_convert lacks linears that are stored in float", findings)


def _is_float(inner: Checkpoint, module: str) -> bool:
    info = inner.tensors.get(f"{module}.weight")
    return info is not None and info.dtype in SCALE_DTYPES


def _add(section: ConfigFields, modules: Iterable[str], what: str, findings: Findings) -> None:
    found = list(modules)
    if found:
        findings.add(section.where, f"{what}: {listed(found)}", _ADVICE)
