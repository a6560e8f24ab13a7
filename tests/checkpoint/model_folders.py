"""Tiny model folders written by the safetensors library or torch, for the tests of the reader."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG = {"model_type": "llama", "hidden_size": 4, "architectures": ["LlamaForCausalLM"]}


def tensors(seed: int = 0, names: tuple[str, ...] = ("a.weight", "b.weight", "c.weight")) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, 6, generator=generator) for name in names}


def write_config(folder: Path, **changes: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes), encoding="utf-8")


def write_single(folder: Path, state: dict[str, Tensor], **config: object) -> Path:
    write_config(folder, **config)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_sharded(folder: Path, parts: list[dict[str, Tensor]], index: bool = True) -> Path:
    write_config(folder)
    weight_map = {}
    for i, part in enumerate(parts):
        name = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    if index:
        write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: dict[str, object], total_size: int = 0) -> None:
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def read_index(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"])
