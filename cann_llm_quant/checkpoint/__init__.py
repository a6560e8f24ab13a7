"""Names to tensors, lazily: the only room that opens weight files."""

from cann_llm_quant.checkpoint.base import Checkpoint, TensorInfo
from cann_llm_quant.checkpoint.open import open_checkpoint

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]
