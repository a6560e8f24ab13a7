"""Quantization maths: tensors in, tensors out; knows no files, no models, no terminal."""
