"""What KV cache formats cost: perplexity and KL through the runner's own pages, a row for each policy.

    python benchmarks/kv_cache.py MODEL --text test.txt --calibration valid.txt [--policy NAME=SPEC …] [--windows 8]

A policy is a SPEC of docs/kv-cache.md, with `sink=N`, `recent=N`, `sensitive=numbers+names` and `page=N` behind
semicolons: `int4+=int4;sink=32;recent=128`. Static scales are calibrated on windows of --calibration first, by
`quantize --method none`. The protocol is that of the other benchmarks: disjoint windows of 1024 tokens, float32.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.checkpoint.companion_tokenizer import tokenizer_of
from cann_llm_quant.evaluate.evaluation import evaluate
from cann_llm_quant.evaluate.windows import cut_windows
from cann_llm_quant.export.native_reader import open_native
from cann_llm_quant.kv_recipe import parse_rules
from cann_llm_quant.models.decoder import DecoderModel
from cann_llm_quant.quant.kv import KvPlan
from cann_llm_quant.runner.cached_windows import CachedWindows
from cann_llm_quant.runner.kv_policy import KvChoice, resolve_plan
from cann_llm_quant.runner.weights import load_packed
from cann_llm_quant.tokenizer import encode

POLICIES = (
    "int8=int8",
    "int8 token=int8-token",
    "fp8_e4m3=fp8_e4m3",
    "fp8_e5m2=fp8_e5m2",
    "int4=int4",
    "int4, sinks and recent=int4;sink=32;recent=128",
    "int4, sinks, recent, sensitive=int4;sink=32;recent=128;sensitive=numbers+names",
)


def calibrated(model: Path, spec: str, text: Path, folder: Path, samples: int) -> Path:
    """A copy of the model with the policy's scales."""
    command = [sys.executable, "-m", "cann_llm_quant", "quantize", str(model), "-o", str(folder), "--method", "none"]
    command += ["--kv-cache", spec, "--data", str(text), "--samples", str(samples), "--seq-len", "512", "--json"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=16)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    loaded = load_packed(str(args.model), torch.device("cpu"), torch.float32)
    model, arch = loaded.model, loaded.model.arch
    ids = encode(loaded.tokenizer, args.text.read_text(encoding="utf-8"), bos=False)
    windows = cut_windows(ids, window=args.window, max_windows=args.windows)
    floats = [model(row[None])[0] for row in windows.ids]

    def reference(rows: Tensor) -> Iterator[Tensor]:
        return iter(floats)

    print("| KV cache | bits a value | perplexity | increase | KL | top-1 |\n|---|---|---|---|---|---|", flush=True)
    for policy in args.policy or POLICIES:
        name, _, rest = policy.partition("=")
        spec, *classes = rest.split(";")
        given = dict(part.split("=") for part in classes)
        choice = KvChoice(
            spec,
            int(given.get("sink", 0)),
            int(given.get("recent", 0)),
            tuple(given["sensitive"].split("+")) if "sensitive" in given else (),
        )
        with tempfile.TemporaryDirectory() as scratch:
            if parse_rules(spec).calibrated:
                folder = calibrated(args.model, spec, args.calibration, Path(scratch) / "out", args.samples)
                with open_native(folder) as checkpoint:
                    plan = resolve_plan(checkpoint, choice, arch.num_layers)
            else:
                with open_checkpoint(str(args.model)) as checkpoint:
                    assert tokenizer_of(checkpoint) is not None
                    plan = resolve_plan(checkpoint, choice, arch.num_layers)
        page = int(given.get("page", 32))
        result = evaluate(
            lambda rows, plan=plan, page=page: cached(model, plan, page, rows), windows, reference=reference
        )
        assert result.divergence is not None
        bits = plan.bits_per_value(page, arch.num_kv_heads, arch.head_dim)
        print(
            f"| {name} | {bits:.2f} | {result.perplexity:.4f} | {result.increase:+.3%} | {result.divergence.kl:.6f} "
            f"| {result.divergence.top1_agreement:.2%} |",
            flush=True,
        )
    print(json.dumps({"float_perplexity": result.divergence.reference_perplexity, "tokens": result.tokens}))


def cached(model: DecoderModel, plan: KvPlan, page: int, rows: Tensor) -> Iterator[Tensor]:
    """Logits of windows, each through pages of its own."""
    for row in rows:
        yield model(row[None], attend=CachedWindows(plan, row[None], page_size=page))[0]


if __name__ == "__main__":
    main()
