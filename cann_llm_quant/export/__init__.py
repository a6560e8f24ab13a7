"""Layouts: pure functions between named tensors and `QuantizedTensor`s, one file per layout, both directions."""
