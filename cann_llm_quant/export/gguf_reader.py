"""The linears of a GGUF file in codes, where its blocks hold codes of ours: Q4_0, Q5_0, Q8_0, MXFP4.

Q4_1 and Q5_1 have a minimum instead of a zero point. It is one where it is a whole number of steps, as in every file
that this tool writes, which says so under ZERO_POINTS; a tensor with a block of which this is not true, and K-quants,
are read as floats.
"""

from collections.abc import Mapping

import torch

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.checkpoint.gguf_reader import GgufCheckpoint
from cann_llm_quant.export.gguf_blocks import SCHEMES, decode, whole_steps
from cann_llm_quant.export.kv_section import KvCache
from cann_llm_quant.export.layout import StoredLinear
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.scheme import MXFP4, QuantizedTensor

ZERO_POINTS = "cann_llm_quant.zero_points"


class GgufReader:
    """The `Reader` of GGUF files; embeddings and heads are linears like others."""

    layout = "gguf"

    def __init__(self, checkpoint: Checkpoint) -> None:
        assert isinstance(checkpoint, GgufCheckpoint), "GGUF is a file"
        self._checkpoint = checkpoint
        self.kv_cache = KvCache()
        self.linears = self._found()
        tied = bool(checkpoint.config["tie_word_embeddings"]) and "model.embed_tokens" in self.linears
        self.tied: Mapping[str, str] = {"lm_head": "model.embed_tokens"} if tied else {}

    def _found(self) -> dict[str, StoredLinear]:
        found = {}
        for name, info in self._checkpoint.tensors.items():
            scheme = SCHEMES.get(self._checkpoint.kind(name))
            if scheme is None or len(info.shape) != 2 or not name.endswith(".weight"):
                continue
            if not (scheme.symmetric or self._has_zero_points(name)):
                continue
            # the type of the scales, but of powers of two the one that holds all of their products
            dtype = torch.bfloat16 if scheme == MXFP4 else torch.float16
            shape = (info.shape[0], info.shape[1])
            found[name.removesuffix(".weight")] = StoredLinear(scheme, shape, (name,), dtype)
        return found

    def _has_zero_points(self, name: str) -> bool:
        if self._checkpoint.metadata.get(ZERO_POINTS) is True:
            return True
        kind = self._checkpoint.kind(name)
        # files of other tools fail at the first row, so that they are not read as a whole to be opened
        return whole_steps(self._checkpoint.first_row(name), kind) and whole_steps(self._checkpoint.rows(name), kind)

    def quantized(self, module: str) -> QuantizedTensor:
        """One linear in its stored codes. Raises CheckpointError for damaged scales."""
        name = f"{module}.weight"
        return decode(module, self._checkpoint.rows(name), self._checkpoint.kind(name))

    def inputs(self, module: str) -> InputQuantizer | None:
        """GGUF says nothing of inputs."""
        return None
