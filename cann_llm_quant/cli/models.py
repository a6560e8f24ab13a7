"""Open whatever a user names as a model, float or written by `quantize`, as a float view with its map and tokenizer."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from cann_llm_quant.checkpoint import Checkpoint
    from cann_llm_quant.models.arch import Arch


@dataclass(frozen=True)
class OpenModel:
    """A model that can be evaluated layer by layer; a native folder's packed linears are dequantized on load."""

    checkpoint: "Checkpoint"
    arch: "Arch"

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer that travels with the weights."""
        from cann_llm_quant.checkpoint.companion_tokenizer import tokenizer_of
        from cann_llm_quant.tokenizer import check_vocabulary

        tokenizer = tokenizer_of(self.checkpoint)
        check_vocabulary(tokenizer, self.arch.vocab_size)
        return tokenizer


def open_model(model: str, *, revision: str | None = None, allow_pickle: bool = False) -> OpenModel:
    """Open a folder, a GGUF file or a hub id; the caller closes its checkpoint. Raises InputError's kinds."""
    from cann_llm_quant.export.packed import open_source
    from cann_llm_quant.models import arch_from_checkpoint

    checkpoint = open_source(model, revision=revision, allow_pickle=allow_pickle)
    return OpenModel(checkpoint, arch_from_checkpoint(checkpoint))
