"""The embedding: as it is, or rounded to int8 with one scale a row before anything runs, so that calibration sees the
rows that will be looked up. A tied head reads the same codes.
"""

import torch

from cann_llm_quant.checkpoint.writer import CheckpointWriter
from cann_llm_quant.export import native
from cann_llm_quant.models.decoder import Table
from cann_llm_quant.models.lookup import QuantizedLookup
from cann_llm_quant.pipeline.layer import linear_entry
from cann_llm_quant.pipeline.layer_tensors import require_finite
from cann_llm_quant.pipeline.linear import SolvedLinear
from cann_llm_quant.pipeline.prepare import Job
from cann_llm_quant.pipeline.row_blocks import blocks_scale_dtype, joined, on_host, row_blocks
from cann_llm_quant.quant import rtn

EMBEDDING = "embedding"


def write_embedding(job: Job, writer: CheckpointWriter) -> None:
    """Write the embedding: as it is, or in int8 for all that read it. Raises NumericError when it is not finite."""
    if EMBEDDING in writer.completed:
        return
    name = job.arch.embedding_name
    module, source = name.removesuffix(".weight"), job.source.load(name)
    require_finite(name, source)
    if module not in job.assignment.tables:
        writer.write_unit(EMBEDDING, {name: source}, {"kept": 1})
        return
    scheme = job.assignment.schemes[module]
    clip: rtn.Clip = "mse" if job.recipe.clipping else "minmax"
    dtype = blocks_scale_dtype(job, source, scheme)
    weight = joined([on_host(rtn.solve(block, scheme, dtype, clip=clip)) for block in row_blocks(job, source)])
    stored = native.encode_table(job.assignment.tables[module], weight)
    entry = linear_entry(SolvedLinear(weight, None), None, None)
    writer.write_unit(EMBEDDING, stored, {"kept": 0, "linears": {module: entry}})


def running_embedding(job: Job, writer: CheckpointWriter) -> Table:
    """The embedding as the quantized model reads it."""
    module = job.arch.embedding_name.removesuffix(".weight")
    if module not in job.assignment.tables:
        return job.source.load(job.arch.embedding_name)
    weight = native.decode(module, writer.read_unit(EMBEDDING), job.assignment.schemes[module])
    return QuantizedLookup(weight, torch.device("cpu"), job.dtype)
