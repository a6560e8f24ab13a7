"""Loads folders with experts by GPTQModel itself, as transformers keeps experts in stacks that GPTQ's files have not.

Usage: python gptqmodel_experts.py IDS.safetensors FOLDER…; each folder gets `loaded.safetensors` with the logits of
`ids` under float16, and in its metadata how many linears are in codes.
"""

import sys
from pathlib import Path

import torch
from gptqmodel import GPTQModel
from safetensors.torch import load_file, save_file


def main() -> None:
    ids = load_file(sys.argv[1])["ids"]
    for folder in map(Path, sys.argv[2:]):
        model = GPTQModel.load(str(folder), device="cpu", dtype=torch.float16).model
        packed = sum("qweight" in part._buffers for part in model.modules())
        with torch.no_grad():
            logits = model(ids).logits.to(torch.float32)
        save_file({"logits": logits}, folder / "loaded.safetensors", metadata={"packed": str(packed)})


main()
