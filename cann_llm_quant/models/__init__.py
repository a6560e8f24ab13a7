"""Architectures as data, and the one decoder that executes them."""

from cann_llm_quant.models.arch_reader import arch_from_checkpoint, arch_from_config, unclaimed

__all__ = ["arch_from_checkpoint", "arch_from_config", "unclaimed"]
