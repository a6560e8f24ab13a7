"""Quantize a model several times larger than the memory allowed, and print what the run's resident memory peaked at.

    python benchmarks/peak_memory.py --work DIR [--layers 24] [--hidden 2560] [--method awq] [--limit-gib 2.5] [--keep]

A random Llama checkpoint is written shard by shard (one layer a shard, bf16), so that this script never holds it
either. The run is a child process; its peak is the kernel's own count (`ru_maxrss`), and with `--limit-gib` the
address space of the child is limited as well (RLIMIT_AS), so that a run that needs more dies instead of passing.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

GIB = 1 << 30
VOCAB = 8000


def layer_tensors(index: int, hidden: int, intermediate: int, kv: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)

    def matrix(out: int, into: int) -> torch.Tensor:
        return (torch.randn(out, into, generator=generator) * (0.5 / into**0.5)).to(torch.bfloat16)

    prefix = f"model.layers.{index}."
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    tensors = {f"{prefix}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return tensors


def write_model(folder: Path, layers: int, hidden: int) -> int:
    """The checkpoint, one shard at a time; returns the bytes of its tensors."""
    folder.mkdir(parents=True)
    intermediate, heads = hidden * 11 // 4 // 128 * 128, hidden // 128
    kv_heads = max(1, heads // 4)
    generator = torch.Generator().manual_seed(999)
    outer = {
        "model.embed_tokens.weight": torch.randn(VOCAB, hidden, generator=generator).to(torch.bfloat16),
        "lm_head.weight": torch.randn(VOCAB, hidden, generator=generator).to(torch.bfloat16),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    weight_map, total = {}, 0
    for number in range(layers + 1):
        tensors = outer if number == layers else layer_tensors(number, hidden, intermediate, kv_heads * 128)
        name = f"model-{number + 1:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = {"<unk>": 0} | {f"w{i}": i for i in range(1, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    draws = torch.randint(1, VOCAB, (40_000,), generator=generator).tolist()
    (folder.parent / "text.txt").write_text(" ".join(f"w{i}" for i in draws))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the model and the output")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--method", default="awq", choices=["awq", "rtn"])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--activation-budget", default="64MiB")
    parser.add_argument("--limit-gib", type=float, help="RLIMIT_AS of the child")
    parser.add_argument("--keep", action="store_true", help="leave the files there")
    args = parser.parse_args()
    model, out = args.work / "model", args.work / "out"
    size = write_model(model, args.layers, args.hidden)
    command = [sys.executable, "-m", "cann_llm_quant", "quantize", str(model), "-o", str(out), "--method", args.method]
    command += ["--activation-budget", args.activation_budget, "--json"]
    if args.method == "awq":
        command += [
            "--data",
            str(args.work / "text.txt"),
            "--samples",
            str(args.samples),
            "--seq-len",
            str(args.seq_len),
        ]

    def limit() -> None:
        if args.limit_gib:
            bytes_allowed = int(args.limit_gib * GIB)
            resource.setrlimit(resource.RLIMIT_AS, (bytes_allowed, bytes_allowed))

    started = time.monotonic()
    result = subprocess.run(command, preexec_fn=limit, stdout=subprocess.PIPE, text=True, check=False)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    layer = sum(t.nbytes for t in layer_tensors(0, args.hidden, args.hidden * 11 // 4 // 128 * 128, 640).values())
    print(
        json.dumps(
            {
                "exit_code": result.returncode,
                "weights_gib": round(size / GIB, 3),
                "layer_float32_gib": round(2 * layer / GIB, 3),
                "peak_rss_gib": round(usage.ru_maxrss * 1024 / GIB, 3),
                "limit_gib": args.limit_gib,
                "wall_s": round(time.monotonic() - started, 1),
                "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
            }
        )
    )
    if not args.keep:
        shutil.rmtree(args.work)
    sys.exit(result.returncode)


main()
