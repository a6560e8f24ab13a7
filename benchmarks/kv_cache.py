"""What KV cache formats cost: perplexity and KL through the runner's own pages, a row for each policy.

    python benchmarks/kv_cache.py MODEL --text test.txt --calibration valid.txt [--policy NAME=SPEC …] [--windows 8]

A policy is a SPEC of docs/kv-cache.md, with `sink=N`, `recent=N`, `sensitive=numbers+names`, `page=N` and, for auto,
`bits=B` behind semicolons: `int4+=int4;sink=32;recent=128`. Static scales are calibrated on windows of --calibration
first, by `quantize --method none`; so is auto, from --kv-sensitivity where that is given. The protocol is that of the
other benchmarks: disjoint windows of 1024 tokens, float32. Below the table it says what auto compared.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.evaluate.evaluation import evaluate
from cann_llm_quant.evaluate.windows import cut_windows
from cann_llm_quant.export.native_reader import open_native
from cann_llm_quant.kv_recipe import parse_rules
from cann_llm_quant.models.decoder import DecoderModel
from cann_llm_quant.pipeline.kv_choice import CHOICE_FILE
from cann_llm_quant.quant.kv import KvPlan
from cann_llm_quant.runner.cached_windows import CachedWindows
from cann_llm_quant.runner.kv_policy import KvChoice, resolve_plan
from cann_llm_quant.runner.weights import load_packed
from cann_llm_quant.tokenizer import encode

POLICIES = (
    "auto=auto",
    "int8=int8",
    "int8 token=int8-token",
    "fp8_e4m3=fp8_e4m3",
    "fp8_e5m2=fp8_e5m2",
    "int4=int4",
    "int4, sinks and recent=int4;sink=32;recent=128",
    "int4, sinks, recent, sensitive=int4;sink=32;recent=128;sensitive=numbers+names",
)


def calibrated(args: argparse.Namespace, spec: str, given: dict[str, str], folder: Path) -> Path:
    """A copy of the model with the policy's scales, kept apart from float pages as the policy says."""
    command = [sys.executable, "-m", "cann_llm_quant", "quantize", str(args.model), "-o", str(folder)]
    command += ["--method", "none", "--kv-cache", spec, "--data", str(args.calibration), "--seq-len", "512"]
    command += ["--samples", str(args.samples), "--kv-page-size", given.get("page", "32"), "--json"]
    if spec == "auto":
        command += ["--kv-bits", given.get("bits", "8")]
        command += ["--kv-sensitivity", str(args.kv_sensitivity)] if args.kv_sensitivity else []
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
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
    parser.add_argument("--kv-sensitivity", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    loaded = load_packed(str(args.model), torch.device("cpu"), torch.float32)
    model, arch = loaded.model, loaded.model.arch
    ids = encode(loaded.tokenizer, args.text.read_text(encoding="utf-8"), bos=False)
    windows = cut_windows(ids, window=args.window, max_windows=args.windows)
    floats = [model(row[None])[0] for row in windows.ids]

    notes: list[str] = []
    print("| KV cache | bits a value | perplexity | increase | KL | top-1 |\n|---|---|---|---|---|---|", flush=True)
    for policy in args.policy or POLICIES:
        name, _, rest = policy.partition("=")
        spec, *options = rest.split(";")
        given = dict(part.split("=") for part in options)
        plan, said = plan_of(args, spec, given, arch.num_layers)
        notes += said
        page = int(given.get("page", 32))
        result = evaluate(partial(cached, model, plan, page), windows, reference=lambda rows: iter(floats[: len(rows)]))
        assert result.divergence is not None
        bits = plan.bits_per_value(page, arch.num_kv_heads, arch.head_dim)
        print(
            f"| {name} | {bits:.2f} | {result.perplexity:.4f} | {result.increase:+.3%} | {result.divergence.kl:.6f} "
            f"| {result.divergence.top1_agreement:.2%} |",
            flush=True,
        )
        reference = result.divergence.reference_perplexity
    print(*notes, f"float: perplexity {reference:.4f} over {result.tokens} tokens", sep="\n")


def plan_of(args: argparse.Namespace, spec: str, given: dict[str, str], layers: int) -> tuple[KvPlan, list[str]]:
    """The policy as it is run, with its scales; for auto also what it compared, in words."""
    sensitive = tuple(given["sensitive"].split("+")) if "sensitive" in given else ()
    choice = KvChoice(spec, int(given.get("sink", 0)), int(given.get("recent", 0)), sensitive)
    if not parse_rules(spec).calibrated:
        with open_checkpoint(str(args.model)) as checkpoint:
            return resolve_plan(checkpoint, choice, layers), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = calibrated(args, spec, given, Path(scratch) / "out")
        with open_native(folder) as stored:
            plan = resolve_plan(stored, replace(choice, scheme=None), layers)
        if spec != "auto":
            return plan, []
        found = json.loads((folder / CHOICE_FILE).read_text(encoding="utf-8"))
    compared = [
        f"  predicted {one['predicted_kl']:.3g}, measured {one['measured_kl']:.3g}: {one['spec']}"
        for one in found["compared"]
    ]
    return plan, [f"auto at {found['bits_wanted']:g} bits: {found['spec']}", *compared]


def cached(model: DecoderModel, plan: KvPlan, page: int, rows: Tensor) -> Iterator[Tensor]:
    """Logits of windows, each through pages of its own."""
    for row in rows:
        yield model(row[None], attend=CachedWindows(plan, row[None], page_size=page))[0]


if __name__ == "__main__":
    main()
