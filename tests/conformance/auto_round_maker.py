"""AutoRound quantizes models in its own format, loads what it wrote, and says the logits.

Usage: python auto_round_maker.py CASES.json OUT, where the file has `ids` and, by name, `cases` of a model's folder, a
`format` and further `options` of AutoRound. OUT gets a folder for each and `NAME.loaded.safetensors` beside it, whose
metadata says by which of AutoRound's classes the products were made.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from auto_round import AutoRound
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

# Rounded without tuning, which would need calibration data.
PLAIN = {"bits": 4, "group_size": 32, "sym": True, "iters": 0, "disable_opt_rtn": True}


def make(folder: Path, source: str, form: str, options: dict) -> None:
    """`source` in AutoRound's format in `folder`."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    made = folder.with_name(f"{folder.name}.made")
    AutoRound(model, tokenizer, device_map="cpu", **PLAIN | options).quantize_and_save(str(made), format=form)
    (config,) = made.rglob("config.json")
    shutil.move(config.parent, folder)


def main(cases: Path, out: Path) -> None:
    asked = json.loads(cases.read_text(encoding="utf-8"))
    for name, case in asked["cases"].items():
        make(out / name, case["source"], case["format"], case["options"])
        model = AutoModelForCausalLM.from_pretrained(out / name, dtype=torch.float32)
        kinds = {type(part).__module__.split(".")[-1] for part in model.modules() if "qweight" in part._buffers}
        with torch.no_grad():
            logits = model(torch.tensor(asked["ids"])).logits.to(torch.float32)
        save_file({"logits": logits}, out / f"{name}.loaded.safetensors", metadata={"kinds": " ".join(sorted(kinds))})


main(Path(sys.argv[1]), Path(sys.argv[2]))
