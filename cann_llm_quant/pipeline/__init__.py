"""The one loop that joins calibration, quantization and export; resumable per layer."""

from cann_llm_quant.pipeline.formats import Quantized, quantize_into
from cann_llm_quant.pipeline.request import Event, QuantizeReport, RunOptions
from cann_llm_quant.pipeline.run import quantize_model

__all__ = ["Event", "QuantizeReport", "Quantized", "RunOptions", "quantize_into", "quantize_model"]
