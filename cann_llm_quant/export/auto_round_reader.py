"""A folder in AutoRound's own format: GPTQ's or AWQ's tensors under a section of its own (`auto_round_config.py`).

| `packing_format` since AutoRound 0.5                | `backend` before (method `intel/auto-round`) | tensors        |
|-----------------------------------------------------|----------------------------------------------|----------------|
| `auto_round:auto_gptq`, `auto_round:gptq`, or none  | with `gptq`, or none                         | GPTQ version 1 |
| `auto_round`, `auto_round:gptqmodel`                | `auto_round:exllamav2`, `auto_round:triton`  | GPTQ version 2 |
| `auto_round:auto_awq`, `auto_round:awq`             | with `awq`                                   | AWQ gemm       |
| `auto_round:fp8`                                    |                                              | FP8 in tiles   |

The section is turned into what the readers of those layouts ask of theirs, and they do the rest; for FP8 it says what
`quant_method` "fp8" does. What is not read: other layouts (`mlx`, `llm_compressor`, `fp8_static`), quantized inputs of
integers, and rotations, which the runtime would have to apply to the inputs.
"""

from collections.abc import Mapping
from typing import Any

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.export.auto_round_config import OLD_METHOD, AutoRoundConfig, section_of
from cann_llm_quant.export.awq_reader import AwqReader
from cann_llm_quant.export.fp8_reader import Fp8Reader
from cann_llm_quant.export.gptq_config import GptqConfig, given_group_size
from cann_llm_quant.export.gptq_reader import GptqReader
from cann_llm_quant.export.layout import Reader
from cann_llm_quant.models.config_fields import ConfigFields
from cann_llm_quant.shown import shown

_FP8 = "auto_round:fp8"
_AWQ = 0
# The version of GPTQ that the tensors are, or AWQ.
_PACKINGS: Mapping[str, int] = {
    "auto": 1,
    "auto_round:auto_gptq": 1,
    "auto_round:gptq": 1,
    "auto_round": 2,
    "auto_round:gptqmodel": 2,
    "auto_round:auto_awq": _AWQ,
    "auto_round:awq": _AWQ,
}


def auto_round_reader(checkpoint: Checkpoint) -> Reader:
    """The reader of the layout whose tensors the folder has.

    Raises CheckpointError for a section that contradicts itself or the tensors, UnsupportedError for what this version
    cannot read.
    """
    fields = section_of(checkpoint)
    packing = _packing(fields)
    if packing == _FP8:
        return Fp8Reader(checkpoint)
    if packing not in _PACKINGS:
        raise UnsupportedError(
            f"{fields.where}: AutoRound's packing_format {shown(packing)} is not read, only {', '.join(_PACKINGS)}, "
            f"{_FP8}; save the model with AutoRound's format auto_gptq, auto_awq or llm_compressor"
        )
    config = AutoRoundConfig.of(checkpoint)
    version = _PACKINGS[packing]
    if version == _AWQ:
        return AwqReader(checkpoint, ConfigFields(_awq_section(config), config.fields.where))
    return GptqReader(checkpoint, _gptq_config(config, version))


def _packing(fields: ConfigFields) -> str:
    """`packing_format`, or what `backend` said before there was one; later a backend only asks for a kernel."""
    backend = fields.values.get("backend")
    old = fields.values.get("quant_method") == OLD_METHOD and not fields.given("packing_format")
    if not old or not isinstance(backend, str):
        return fields.text("packing_format", "auto")
    known = (("awq", "auto_round:auto_awq"), ("gptq", "auto_round:auto_gptq"), ("auto_round:", "auto_round"))
    return next((packing for part, packing in known if part in backend), backend)


def _awq_section(config: AutoRoundConfig) -> dict[str, Any]:
    """Where overrides differ from the rest, nothing is claimed: shapes and zero points tell."""
    section: dict[str, Any] = {"version": "gemm", "bits": config.fields.values.get("bits")}
    for key in ("group_size", "sym"):
        if not any(own.given(key) for own in config.in_codes()):
            section[key] = config.fields.values.get(key)
    return section


def _gptq_config(config: AutoRoundConfig, version: int) -> GptqConfig:
    """Widths are left out, as shapes tell them."""
    return GptqConfig(
        version=version,
        group_size=given_group_size(config.fields),
        symmetric=config.fields.optional_flag("sym"),
        overrides=config.patterns,
        named=config.named,
    )
