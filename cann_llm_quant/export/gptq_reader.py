"""A GPTQ folder read into codes: both versions, any `g_idx`, mixed widths; see `gptq.py` for the layout.

Widths come from the shapes: `qzeros` has `out * b / 32` words a group. Whether zero points are stored as z - 1 or z is
what `checkpoint_format` says, version 1 where it is absent. Only a symmetric linear tells it itself: its zero point is
2^(b-1), so that fields of 2^(b-1) - 1 can only be version 1 and fields of 2^(b-1) only version 2. There the data is
followed, whatever the config says, since files with the wrong field are about (C17). Other zero points contradict
`sym` and are refused.

Columns may be scattered over groups (act order): `g_idx` then becomes `QuantizedTensor.group_index` (C20). A last group
that is too short is cut, with the others, into groups of the common divisor, which changes no weight.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Int8, Int32, UInt8
from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.export.gptq import BITS, WORD, decode_codes, decode_zeros, neighbours
from cann_llm_quant.export.gptq_config import GptqConfig
from cann_llm_quant.export.kv_section import KvCache
from cann_llm_quant.export.layout import StoredLinear
from cann_llm_quant.export.weight_only import finite, stored_matrix, stored_modules
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.bit_stream import to_codes
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme, scheme_for

# AutoRound packs 5 and 6 as GPTQ does the others.
_BITS = (*BITS, 5, 6)


@dataclass(frozen=True)
class _Stored:
    """One linear; `width` is the columns of a stored group, of which a scheme's group may be a part."""

    linear: StoredLinear
    width: int


class GptqReader:
    """The linears of a GPTQ folder; implements `layout.Reader`.

    Raises CheckpointError for shapes and types that contradict each other or the config, UnsupportedError for relatives
    of the layout (Marlin, planar). Of the tensors only the small `g_idx` are read before `quantized`. `config` is said
    in place of the folder's own.
    """

    def __init__(self, checkpoint: Checkpoint, config: GptqConfig | None = None) -> None:
        self._checkpoint = checkpoint
        self._config = config or GptqConfig.of(checkpoint)
        self._stored = {module: self._described(module) for module in stored_modules(checkpoint, "qweight")}
        self.layout = "gptq" if self._config.version == 1 else "gptq_v2"
        self.linears: Mapping[str, StoredLinear] = {name: stored.linear for name, stored in self._stored.items()}
        self.tied: Mapping[str, str] = {}
        self.kv_cache = KvCache()

    def _described(self, module: str) -> _Stored:
        checkpoint, names = self._checkpoint, {part: f"{module}.{part}" for part in ("qweight", "qzeros", "scales")}
        words, out = stored_matrix(checkpoint, names["qweight"], torch.int32)
        groups, zero_words = stored_matrix(checkpoint, names["qzeros"], torch.int32)
        bits, rest = divmod(zero_words * WORD, out)
        columns = words * WORD // max(bits, 1)
        scales = stored_matrix(checkpoint, names["scales"], None)
        if rest or bits not in _BITS or columns % WORD or scales != (groups, out):
            raise CheckpointError(
                f"{checkpoint.path}: {module} has qweight [{words}, {out}], qzeros [{groups}, {zero_words}] and scales "
                f"{list(scales)}, which are those of no GPTQ linear of {', '.join(map(str, sorted(_BITS)))} bits"
            )
        index = checkpoint.tensors.get(f"{module}.g_idx")
        if index is not None:
            names["g_idx"] = index.name
            if index.dtype != torch.int32 or index.shape != (columns,):
                raise CheckpointError(
                    f"{checkpoint.path}: {index.name} is {index.dtype} {list(index.shape)}, expected int32 [{columns}]"
                )
        size, symmetric = self._config.for_module(module)
        width = self._width(module, size, columns, groups)
        scheme = _scheme(bits, width, columns, symmetric is True, whole_row=groups == 1 and (size or -1) == -1)
        linear = StoredLinear(
            scheme,
            shape=(out, columns),
            tensors=tuple(names.values()),
            dtype=checkpoint.tensors[names["scales"]].dtype,
            scattered=index is not None and self._scattered(module, checkpoint.load(index.name), width, groups),
        )
        return _Stored(linear, width)

    def _width(self, module: str, size: int | None, columns: int, groups: int) -> int:
        """Columns of a group: what the config says where it fits, else what the shapes say."""
        if size is not None and size > 0 and math.ceil(columns / size) == groups:
            return size
        if columns % groups:
            raise CheckpointError(
                f"{self._checkpoint.path}: {module} has {groups} groups of scales for {columns} columns, which the "
                f"config's group_size {size} does not give"
            )
        return columns // groups

    def quantized(self, module: str) -> QuantizedTensor:
        """One linear in its stored codes. Raises CheckpointError when its tensors contradict each other."""
        stored = self._stored[module]
        scheme = stored.linear.scheme
        load = {name.rpartition(".")[2]: self._checkpoint.load(name) for name in stored.linear.tensors}
        zeros = self._zeros(module, decode_zeros(load["qzeros"], scheme.bits), scheme)
        scale = finite(f"{self._checkpoint.path}: {module}.scales", load["scales"]).t().contiguous()
        codes = decode_codes(load["qweight"], scheme.bits)
        index = load["g_idx"] if stored.linear.scattered else None
        if index is None and scheme.group_size is not None and scheme.group_size != stored.width:
            parts, count = stored.width // scheme.group_size, stored.linear.shape[1] // scheme.group_size
            scale = scale.repeat_interleave(parts, dim=1)[:, :count].contiguous()
            zeros = None if zeros is None else zeros.repeat_interleave(parts, dim=1)[:, :count].contiguous()
        return QuantizedTensor(codes, scale, zeros, scheme, group_index=index)

    def _zeros(
        self, module: str, fields: UInt8[Tensor, "out groups"], scheme: Scheme
    ) -> Int8[Tensor, "out groups"] | None:
        half = 1 << (scheme.bits - 1)
        if not scheme.symmetric:
            offset = 1 if self._config.version == 1 else 0
            return to_codes((fields + offset).bitwise_and_(2 * half - 1).contiguous(), scheme.bits)
        low, high = int(fields.amin()), int(fields.amax())
        if low != high or low not in (half - 1, half):
            raise CheckpointError(
                f"{self._checkpoint.path}: the config says sym, but {module}.qzeros holds {low} to {high} instead of "
                f"{half - 1} or {half} everywhere; correct the field"
            )
        return None

    def _scattered(self, module: str, index: Int32[Tensor, "columns"], width: int, groups: int) -> bool:
        """Whether `g_idx` names other groups than runs of neighbours."""
        if torch.equal(index, neighbours(len(index), width)):
            return False
        low, high = int(index.amin()), int(index.amax())
        if low < 0 or high >= groups:
            raise CheckpointError(
                f"{self._checkpoint.path}: {module}.g_idx names groups {low} to {high} of {groups}; the file is damaged"
            )
        if len(index) % width:
            raise UnsupportedError(
                f"{self._checkpoint.path}: {module} has {len(index)} columns scattered over groups of {width}, which "
                "do not divide them; such act order is not read"
            )
        return True

    def inputs(self, module: str) -> InputQuantizer | None:
        """None: inputs stay in float."""
        del module
        return None


def _scheme(bits: int, width: int, columns: int, symmetric: bool, *, whole_row: bool) -> Scheme:
    return scheme_for(bits, -1 if whole_row else math.gcd(width, columns), symmetric)
