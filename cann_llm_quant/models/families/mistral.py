"""Mistral 7B and its successors: Llama with a sliding window in every layer.

It is null since v0.2; where the field is absent it means 4096.
"""

from cann_llm_quant.models.layer_map import Family
from cann_llm_quant.models.windows import window_everywhere

FAMILY = Family(model_type="mistral", window=window_everywhere(default=4096))
