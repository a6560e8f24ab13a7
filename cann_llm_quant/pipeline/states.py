"""The activations that a run carries from layer to layer: the quantized model's and, where errors are fed back against
it, the float model's.

They are taken up from spool files where a killed run left them, else computed again: the quantized model's by its
stored layers, the float model's by the source's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from cann_llm_quant.calibrate.stream import HiddenStates
from cann_llm_quant.checkpoint.writer import CheckpointWriter
from cann_llm_quant.models.arch import Layer
from cann_llm_quant.models.decoder import DecoderLayer, Table
from cann_llm_quant.pipeline.embedding import running_embedding
from cann_llm_quant.pipeline.layer_tensors import build_running, load_float, stored_inputs, stored_layer
from cann_llm_quant.pipeline.prepare import Job
from cann_llm_quant.pipeline.request import Event


@dataclass(frozen=True)
class Streams:
    """Hidden states before the layer that is next; `float_model` is None where the method needs no float partner."""

    quantized: HiddenStates
    float_model: HiddenStates | None

    def __iter__(self) -> Iterator[HiddenStates]:
        return iter([self.quantized] if self.float_model is None else [self.quantized, self.float_model])

    def probe(self) -> Tensor:
        """The first window."""
        return next(self.quantized.windows())

    def forget_before(self, index: int) -> None:
        """Delete files of states that no resume needs any more."""
        for states in self:
            states.forget_before(index)


def streams_before(job: Job, writer: CheckpointWriter, index: int, tell: Callable[[Event], None]) -> Streams | None:
    """The states before layer `index`; None for a run that reads no text."""
    if job.ids is None:
        return None
    paired = job.recipe.effort_plan.drift
    streams = Streams(_states(job, writer, "states", paired), _states(job, writer, "float", paired) if paired else None)
    builders: list[Callable[[Layer], DecoderLayer]] = [
        lambda layer: build_running(
            job, layer, stored_layer(writer, layer, job.assignment.schemes), stored_inputs(job, writer, layer)
        ),
        lambda layer: build_running(job, layer, load_float(job, layer)),
    ]
    tables: list[Callable[[], Table]] = [
        lambda: running_embedding(job, writer),
        lambda: job.source.load(job.arch.embedding_name),
    ]
    for states, build, table in zip(streams, builders, tables, strict=False):
        if index and states.resume(index):
            continue
        states.start(table(), job.ids)
        for layer in job.arch.layers[:index]:
            for window in states.advance(build(layer)):
                done, total = layer.index * states.shape[0] + window, index * states.shape[0]
                tell(Event("replay", done, total, f"layer {layer.index + 1}/{index}"))
    return streams


def _states(job: Job, writer: CheckpointWriter, name: str, paired: bool) -> HiddenStates:
    assert job.ids is not None
    shape = (job.ids.shape[0], job.ids.shape[1], job.arch.hidden_size)
    budget = job.budgets[0] // (2 if paired else 1)
    return HiddenStates(shape, job.dtype, budget=budget, scratch=writer.scratch, device=job.device, name=name)
