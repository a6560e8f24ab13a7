"""How fast a native checkpoint becomes any other layout, beside how fast the disk copies the same files.

    python benchmarks/export_speed.py WORK_FOLDER [--layout gptq ...] [--asymmetric]

The model is a random Llama of 1.1 billion parameters (the shape of TinyLlama), rounded in 4 bits with groups of
64. Each export runs in a process of its own, so that its peak memory is its own; the copy is that of the native folder,
flushed to the disk as exports are. Rates are given twice: by the bytes of the source, and by the bytes that were moved,
half of those read and written; of a copy both are the same.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LAYOUTS = ("compressed-tensors", "ascend", "awq", "gptq", "gptq_v2", "mlx", "gguf", "onnx", "float")
_RUN = """
import json, resource, sys, time
from pathlib import Path
from cann_llm_quant.export.layouts import ExportOptions, export_model
source, output, layout = sys.argv[1:]
start = time.monotonic()
done = export_model(source, Path(output), layout, ExportOptions(tokenizer=layout != "gguf"))
seconds = time.monotonic() - start
print(json.dumps({"seconds": seconds, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                  "written": done.total_bytes}))
"""


def save_random(folder: Path) -> None:
    """The float model, one file a layer."""
    folder.mkdir(parents=True)
    config = LlamaConfig(**SHAPE)
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    h, i, kv = config.hidden_size, config.intermediate_size, config.num_key_value_heads * 64
    sizes = {"self_attn.q_proj": (h, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h)}
    sizes |= {"self_attn.o_proj": (h, h), "mlp.gate_proj": (i, h), "mlp.up_proj": (i, h), "mlp.down_proj": (h, i)}
    files = [{"model.embed_tokens.weight": (config.vocab_size, h), "lm_head.weight": (config.vocab_size, h)}]
    files[0]["model.norm.weight"] = (h,)
    for n in range(config.num_hidden_layers):
        layer = {f"model.layers.{n}.{name}.weight": size for name, size in sizes.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        files.append(layer | {f"model.layers.{n}.{norm}.weight": (h,) for norm in norms})
    for number, names in enumerate(files, 1):
        tensors = {
            name: torch.ones(size, dtype=torch.bfloat16)
            if len(size) == 1
            else torch.empty(size, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            for name, size in names.items()
        }
        save_file(tensors, folder / f"model-{number:05d}-of-{len(files):05d}.safetensors", metadata={"format": "pt"})
    words = {f"w{n}": n for n in range(config.vocab_size)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0"))).save_pretrained(folder)


def copy_rate(source: Path, target: Path) -> float:
    """Bytes a second of a copy that is flushed to the disk."""
    shutil.rmtree(target, ignore_errors=True)
    start = time.monotonic()
    shutil.copytree(source, target)
    for path in target.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    seconds = time.monotonic() - start
    shutil.rmtree(target)
    return folder_bytes(source) / seconds


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--layout", nargs="*", default=list(LAYOUTS))
    parser.add_argument("--asymmetric", action="store_true")
    arguments = parser.parse_args()
    symmetry = "asymmetric" if arguments.asymmetric else "symmetric"
    plain, native = arguments.work / "float", arguments.work / f"native-{symmetry}"
    if not native.exists():
        if not plain.exists():
            save_random(plain)
        command = [sys.executable, "-m", "cann_llm_quant", "quantize", str(plain), "-o", str(native)]
        subprocess.run([*command, "--method", "rtn", "--bits", "4", "--group-size", "64", f"--{symmetry}"], check=True)
    rates = [copy_rate(native, arguments.work / "copy") for _ in range(3)]
    copy = sorted(rates)[1]
    print(f"copy: {copy / 1e6:.0f} MB/s (median of {', '.join(f'{rate / 1e6:.0f}' for rate in rates)})")
    for layout in arguments.layout:
        output = arguments.work / f"out-{layout}"
        shutil.rmtree(output, ignore_errors=True)
        run = subprocess.run(
            [sys.executable, "-c", _RUN, str(native), str(output), layout], capture_output=True, text=True, check=False
        )
        if run.returncode:
            print(f"{layout}: {run.stderr.strip().splitlines()[-1]}")
            continue
        result = json.loads(run.stdout.splitlines()[-1])
        read, written, seconds = folder_bytes(native), result["written"], result["seconds"]
        moved = (read + written) / 2
        print(
            f"{layout}: {seconds:.1f} s, {read / seconds / 1e6:.0f} MB/s of source ({read / seconds / copy:.2f} of a "
            f"copy), {written / 1e6:.0f} MB written: {moved / seconds / 1e6:.0f} MB/s moved "
            f"({moved / seconds / copy:.2f}); peak memory {result['peak'] / 1e6:.0f} MB",
            flush=True,
        )
        shutil.rmtree(output, ignore_errors=True)


if __name__ == "__main__":
    main()
