"""An AutoAWQ folder read into codes; see `awq.py` for the layout.

Only `gemm` is read: `gemv` and its relatives pack along the input features. Shapes tell the group size; the config must
agree. Files say nothing of symmetry that could be relied on, as some writers put `sym: true` over any zero points:
unless the section says `sym: false`, the small `qzeros` of every linear are read when the folder is opened, and a
linear whose zero points are all 8 is symmetric.
"""

from collections.abc import Mapping

import torch

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.export.awq import BITS, PER_WORD, decode_codes, decode_zeros
from cann_llm_quant.export.kv_section import KvCache
from cann_llm_quant.export.layout import StoredLinear
from cann_llm_quant.export.weight_only import finite, stored_matrix, stored_modules
from cann_llm_quant.models.config_fields import ConfigFields
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.scheme import QuantizedTensor, scheme_for
from cann_llm_quant.shown import shown

_SYMMETRIC_ZEROS = 0x88888888 - (1 << 32)


class AwqReader:
    """The linears of an AWQ folder; implements `layout.Reader`.

    Raises CheckpointError for shapes and types that contradict each other or the config, UnsupportedError for relatives
    of the layout. No weight is read before `quantized`. `section` is said in place of the config's own.
    """

    layout = "awq"

    def __init__(self, checkpoint: Checkpoint, section: ConfigFields | None = None) -> None:
        self._checkpoint = checkpoint
        fields = section or _section(checkpoint)
        _check_form(fields)
        self._group_size = fields.optional_integer("group_size", "q_group_size", minimum=-1)
        self._may_be_symmetric = fields.optional_flag("sym") is not False
        self.linears: Mapping[str, StoredLinear] = {
            module: self._described(module) for module in stored_modules(checkpoint, "qweight")
        }
        self.tied: Mapping[str, str] = {}
        self.kv_cache = KvCache()

    def _described(self, module: str) -> StoredLinear:
        checkpoint = self._checkpoint
        names = tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
        columns, words = stored_matrix(checkpoint, names[0], torch.int32)
        zeros = stored_matrix(checkpoint, names[1], torch.int32)
        groups, out = stored_matrix(checkpoint, names[2], None)
        if out != words * PER_WORD or zeros != (groups, words) or columns % groups:
            raise CheckpointError(
                f"{checkpoint.path}: {module} has qweight [{columns}, {words}], qzeros {list(zeros)} and scales "
                f"[{groups}, {out}], which are those of no AWQ gemm linear"
            )
        size, width = self._group_size, columns // groups
        if size is not None and size != width and not (size == -1 and groups == 1):
            raise CheckpointError(
                f"{checkpoint.path}: {module} has {groups} groups of scales for {columns} columns, which the config's "
                f"group_size {size} does not give"
            )
        symmetric = self._may_be_symmetric and bool((checkpoint.load(names[1]) == _SYMMETRIC_ZEROS).all())
        scheme = scheme_for(BITS, -1 if groups == 1 and size in (None, -1) else width, symmetric)
        return StoredLinear(scheme, (out, columns), names, checkpoint.tensors[names[2]].dtype)

    def quantized(self, module: str) -> QuantizedTensor:
        """One linear in its stored codes. Raises CheckpointError for scales that are not finite."""
        stored = self.linears[module]
        qweight, qzeros, scales = (self._checkpoint.load(name) for name in stored.tensors)
        scale = finite(f"{self._checkpoint.path}: {module}.scales", scales).t().contiguous()
        zeros = None if stored.scheme.symmetric else decode_zeros(qzeros)
        return QuantizedTensor(decode_codes(qweight), scale, zeros, stored.scheme)

    def inputs(self, module: str) -> InputQuantizer | None:
        """None: inputs stay in float."""
        del module
        return None


def _section(checkpoint: Checkpoint) -> ConfigFields:
    section = ConfigFields(checkpoint.config).section("quantization_config")
    values = {} if section is None else section.values
    return ConfigFields(values, f"{checkpoint.path}/config.json: quantization_config")


def _check_form(fields: ConfigFields) -> None:
    form = fields.text("version", fields.text("format", "gemm")).lower()
    if form != "gemm":
        raise UnsupportedError(f"{fields.where}: AWQ version {shown(form)} is not read, only gemm")
    if fields.text("backend", "auto").lower() == "llm-awq":
        raise UnsupportedError(f"{fields.where}: the backend llm-awq has a layout of its own, which is not read")
    bits = fields.integer("bits", "w_bit", default=BITS)
    if bits != BITS:
        raise UnsupportedError(f"{fields.where}: AWQ of {bits} bits is not read, only of {BITS}")
