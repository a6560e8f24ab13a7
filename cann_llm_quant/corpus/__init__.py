"""Text to token windows: sources, rows, packing; the only room that reads `datasets`."""

from cann_llm_quant.corpus.documents import Order, TextResult, load_text
from cann_llm_quant.corpus.sources import (
    CorpusSource,
    default_evaluation_source,
    default_source,
    parse_source,
)
from cann_llm_quant.corpus.windows import CorpusReport, SourceReport, Windows, load_windows

__all__ = [
    "CorpusReport",
    "CorpusSource",
    "Order",
    "SourceReport",
    "TextResult",
    "Windows",
    "default_evaluation_source",
    "default_source",
    "load_text",
    "load_windows",
    "parse_source",
]
