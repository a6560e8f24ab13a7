"""The tokenizer that travels with a checkpoint, whatever container it came in."""

import tempfile
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.tokenizer import load_tokenizer


def tokenizer_of(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, read from a private copy of its companion files (a GGUF file has no folder of them).

    Raises InputError's kinds when there is none or it cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="cann-llm-quant-") as folder:
        for name, content in checkpoint.companion_files().items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        try:
            return load_tokenizer(Path(folder))
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(folder, str(checkpoint.path))) from error
