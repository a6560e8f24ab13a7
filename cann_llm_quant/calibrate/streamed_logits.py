"""Logits of a model of any size: all windows through one layer, then the next, then the head window by window.

One layer is in memory at a time, so a reference larger than the machine's memory can be evaluated. A native checkpoint
is read in float; where it quantizes the inputs of linears, that is done here as it says. Attention is causal within a
window, or what `attend` makes of it: a new one for each set of windows, called for every window of one layer in turn.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cann_llm_quant.calibrate.stream import HiddenStates
from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.export.packed_checkpoint import input_quantizers
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.models.attention import Attend
from cann_llm_quant.models.decoder import DenseLinear, head
from cann_llm_quant.models.weights import build_layer, load_layer, load_outer


class StreamedLogits:
    """`windows -> logits of one window after another`; `progress(done, total)` counts windows through layers."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        arch: Arch,
        *,
        device: torch.device,
        dtype: torch.dtype,
        budget: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
        attend: Callable[[Int[Tensor, "windows seq"]], Attend] | None = None,
    ) -> None:
        self._checkpoint, self._arch = checkpoint, arch
        self._device, self._dtype, self._budget = device, dtype, budget
        self._progress, self._attend = progress, attend
        self._inputs = input_quantizers(checkpoint)

    @torch.inference_mode()
    def __call__(self, windows: Int[Tensor, "windows seq"]) -> Iterator[Float[Tensor, "seq vocab"]]:
        """Logits of every window, in order, in the compute dtype; NaN passes through, for evaluation to locate."""
        count, length = windows.shape
        attend = None if self._attend is None else self._attend(windows)
        shape, total = (count, length, self._arch.hidden_size), count * self._arch.num_layers
        with tempfile.TemporaryDirectory(prefix="cann-llm-quant-") as scratch:
            states = HiddenStates(shape, self._dtype, budget=self._budget, scratch=Path(scratch), device=self._device)
            states.start(self._checkpoint.load(self._arch.embedding_name), windows)
            for index in range(self._arch.num_layers):
                tensors = load_layer(self._checkpoint, self._arch, index, self._device, self._dtype)
                layer = build_layer(self._arch, index, tensors, self._inputs)
                for done in states.advance(layer, check_finite=False, attend=attend):
                    self._progress(index * count + done, total)
                states.forget_before(index + 1)
            outer = load_outer(self._checkpoint, self._arch, self._device, self._dtype)
            head_op = DenseLinear(outer.head)
            for x in states.windows():
                yield head(self._arch, outer.norm, head_op, x)[0]
