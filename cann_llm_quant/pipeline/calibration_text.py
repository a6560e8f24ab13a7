"""The windows of text that a model is calibrated on, cut by its own tokenizer."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from jaxtyping import Int64
from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.checkpoint.companion_tokenizer import tokenizer_of
from cann_llm_quant.corpus import default_source, load_windows, parse_source
from cann_llm_quant.errors import UsageError
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.pipeline.request import Event
from cann_llm_quant.recipe import Calibration
from cann_llm_quant.tokenizer import check_vocabulary


def calibration_windows(
    source: Checkpoint, arch: Arch, wanted: Calibration, *, allow_fewer: bool, tell: Callable[[Event], None]
) -> tuple[Int64[Tensor, "windows seq"], dict[str, Any]]:
    """Token ids, one window a row, and the report of where they came from.

    Raises UsageError for windows longer than the model's positions, CorpusError for too little text.
    """
    if wanted.length > arch.max_positions:
        raise UsageError(
            f"calibration windows of {wanted.length} tokens exceed the model's {arch.max_positions} positions; "
            f"use --seq-len {arch.max_positions} or less"
        )
    tokenizer = tokenizer_of(source)
    check_vocabulary(tokenizer, arch.vocab_size)
    sources = [default_source() if spec == "default" else parse_source(spec) for spec in wanted.data]
    windows = load_windows(
        sources,
        tokenizer,
        samples=wanted.samples,
        length=wanted.length,
        seed=wanted.seed,
        allow_fewer=allow_fewer,
    )
    if windows.ids.shape[0] < wanted.samples:
        found = f"{windows.ids.shape[0]} windows of {wanted.length} tokens"
        message = f"the text holds {found}, not the {wanted.samples} asked for"
        tell(Event("prepare", message=message, warning=True))
    return windows.ids, asdict(windows.report)
