"""Stored tensors as a folder that a reader opens, and quantized linears compared bit for bit."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from cann_llm_quant.quant.scheme import QuantizedTensor


def save_stored(folder: Path, tensors: dict[str, Tensor], key: str, section: dict[str, object]) -> Path:
    """The tensors in one file, beside a `config.json` that has nothing but `section` under `key`."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({key: section}), encoding="utf-8")
    return folder


def same(one: QuantizedTensor, other: QuantizedTensor) -> bool:
    """Equal in everything that is stored of them."""
    pairs = [
        (one.codes, other.codes),
        (one.scale, other.scale),
        (one.zero_point, other.zero_point),
        (one.group_index, other.group_index),
    ]
    equal = all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)
    return equal and one.scheme == other.scheme
