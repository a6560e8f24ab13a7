"""The linears of an MLX folder in codes; `mlx_folder.py` says which of them have any."""

from collections.abc import Mapping

from cann_llm_quant.export.kv_section import KvCache
from cann_llm_quant.export.layout import StoredLinear
from cann_llm_quant.export.mlx_folder import MlxFolder, MlxLinear, whole_zeros
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.scheme import QuantizedTensor, scheme_for


class MlxReader:
    """Linears with whole zero points; implements `layout.Reader`. The folder must be the one that is read further."""

    layout = "mlx"

    def __init__(self, folder: MlxFolder) -> None:
        self._folder = folder
        self.linears: Mapping[str, StoredLinear] = {
            module: _stored(module, linear) for module, linear in folder.linears.items() if linear.kind != "float"
        }
        self.tied: Mapping[str, str] = _tied(folder, self.linears)
        self.kv_cache = KvCache()

    def quantized(self, module: str) -> QuantizedTensor:
        """One linear in its stored codes. Raises CheckpointError for scales that are not finite."""
        scheme = self.linears[module].scheme
        scale, bias = self._folder.affine(module)
        zeros = None if scheme.symmetric else whole_zeros(scale, bias, scheme.bits)
        return QuantizedTensor(self._folder.codes(module), scale, zeros, scheme)

    def inputs(self, module: str) -> InputQuantizer | None:
        """None: inputs stay in float."""
        del module
        return None


def _stored(module: str, linear: MlxLinear) -> StoredLinear:
    scheme = scheme_for(linear.bits, linear.group_size, linear.kind == "symmetric")
    names = tuple(f"{module}.{part}" for part in ("weight", "scales", "biases"))
    return StoredLinear(scheme, linear.shape, names, linear.dtype)


def _tied(folder: MlxFolder, linears: Mapping[str, StoredLinear]) -> dict[str, str]:
    """The head of a model with tied embeddings reads the embedding's codes."""
    embedding, head = "model.embed_tokens", "lm_head"
    tied = folder.config.get("tie_word_embeddings") is True and f"{head}.weight" not in folder.tensors
    return {head: embedding} if tied and embedding in linears else {}
