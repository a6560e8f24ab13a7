"""Calibrate, quantize, export, prove and run large language models, one layer in memory at a time."""

__version__ = "0.1.0"
