"""Runs models: what `quantize` wrote, from packed weights, or a float checkpoint."""

from cann_llm_quant.runner.engine import Chunk, Generation, LLMEngine

__all__ = ["Chunk", "Generation", "LLMEngine"]
