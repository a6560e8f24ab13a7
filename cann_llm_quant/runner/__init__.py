"""Runs models: what `quantize` wrote, from packed weights, or a float checkpoint."""

from cann_llm_quant.runner.answer import Chunk, Generation
from cann_llm_quant.runner.engine import LLMEngine
from cann_llm_quant.runner.service import Handle

__all__ = ["Chunk", "Generation", "Handle", "LLMEngine"]
