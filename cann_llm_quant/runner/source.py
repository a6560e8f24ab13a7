"""Whatever a user names as a model, opened: what `quantize` wrote by its own reader, everything else as float."""

from cann_llm_quant.checkpoint import Checkpoint, open_checkpoint
from cann_llm_quant.checkpoint.hub import locate
from cann_llm_quant.export.native_reader import is_native, open_native


def open_source(model: str, *, revision: str | None = None, allow_pickle: bool = False) -> Checkpoint:
    """A folder, a GGUF file or a hub id (`revision` applies to the latter); the caller closes it.

    Raises InputError's kinds.
    """
    path = locate(model, revision=revision, allow_pickle=allow_pickle)
    return open_native(path) if is_native(path) else open_checkpoint(str(path), allow_pickle=allow_pickle)
