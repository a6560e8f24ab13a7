"""A peer tool on the reference model: quantize in the shared protocol, write the result back as plain floats.

    python benchmarks/peers.py PEER MODEL OUT --text valid.txt [--bits 4] [--group-size 64] [--device cuda]

Runs in an environment of the peer's own (`pip install llmcompressor` or `auto-round`), never in the project's. Every
peer gets the same token windows, the ones `quantize --data` cuts from a running text (window i of S starts at token
floor(i * (tokens - N) / (S - 1))), a float32 copy of the model, and otherwise its own defaults; the decoder linears are
quantized, the head is not. A weight goes back as the values the peer's own arithmetic dequantizes it to. Prints one
JSON line: the seconds of the quantizing call, the process's CPU seconds and peak memory until then. What OUT is worth
is for the evaluator to say (`--act int8tok` for the W8A8 peers).
"""

import argparse
import hashlib
import json
import platform
import resource
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def windows(tokenizer: PreTrainedTokenizerBase, text: Path, samples: int, length: int) -> torch.Tensor:
    """`samples` windows of `length` token ids, spread evenly over the text."""
    stream = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    starts = [i * (len(stream) - length) // (samples - 1) for i in range(samples)]
    return torch.tensor([stream[start : start + length] for start in starts])


def llmcompressor(model: PreTrainedModel, ids: torch.Tensor, recipe: list[object], args: argparse.Namespace) -> None:
    """Apply the recipe, then put the dequantized values where the weights were."""
    from compressed_tensors.quantization import forward_quantize
    from compressed_tensors.utils import update_offload_parameter
    from datasets import Dataset
    from llmcompressor import oneshot

    rows = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    oneshot(
        model=model,
        tokenizer=str(args.model),
        dataset=rows,
        recipe=recipe,
        max_seq_length=args.seq_len,
        num_calibration_samples=args.samples,
        shuffle_calibration_samples=False,
        batch_size=args.batch_size or 1,
    )
    for module in model.modules():
        if scheme := getattr(module, "quantization_scheme", None):
            update_offload_parameter(
                module, "weight", forward_quantize(module, module.weight, "weight", scheme.weights)
            )


def scheme(args: argparse.Namespace, **weights: object) -> dict[str, object]:
    """llm-compressor's scheme of the decoder linears: integer weights, int8 activations per token where asked for."""
    grouped = {"strategy": "group", "group_size": args.group_size} if args.group_size else {"strategy": "channel"}
    group = {"targets": ["Linear"], "weights": {"num_bits": args.bits, "symmetric": args.symmetric} | grouped | weights}
    if args.int8_activations:
        group["input_activations"] = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
    return {"config_groups": {"linears": group}, "ignore": ["lm_head"]}


def run_rtn(model: PreTrainedModel, ids: torch.Tensor, args: argparse.Namespace) -> None:
    from llmcompressor.modifiers.quantization import QuantizationModifier

    llmcompressor(model, ids, [QuantizationModifier(**scheme(args))], args)


def run_gptq(model: PreTrainedModel, ids: torch.Tensor, args: argparse.Namespace) -> None:
    from llmcompressor.modifiers.gptq import GPTQModifier

    llmcompressor(model, ids, [GPTQModifier(**scheme(args))], args)


def run_gptq_mse(model: PreTrainedModel, ids: torch.Tensor, args: argparse.Namespace) -> None:
    from llmcompressor.modifiers.gptq import GPTQModifier

    llmcompressor(model, ids, [GPTQModifier(**scheme(args, observer="mse"))], args)


def run_awq(model: PreTrainedModel, ids: torch.Tensor, args: argparse.Namespace) -> None:
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    llmcompressor(model, ids, [AWQModifier(), QuantizationModifier(**scheme(args))], args)


def run_awq_gptq(model: PreTrainedModel, ids: torch.Tensor, args: argparse.Namespace) -> None:
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    llmcompressor(model, ids, [AWQModifier(), GPTQModifier(**scheme(args))], args)


def run_smoothquant_gptq(model: PreTrainedModel, ids: torch.Tensor, args: argparse.Namespace) -> None:
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    recipe = [SmoothQuantModifier(smoothing_strength=0.8), GPTQModifier(**scheme(args))]
    llmcompressor(model, ids, recipe, args)


def run_autoround(model: PreTrainedModel, ids: torch.Tensor, args: argparse.Namespace) -> None:
    from auto_round import AutoRound

    batch = args.batch_size or 8
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(batch)]
    tuner = AutoRound(
        model,
        tokenizer=AutoTokenizer.from_pretrained(args.model),
        scheme={"bits": args.bits, "group_size": args.group_size or -1, "sym": args.symmetric, "data_type": "int"},
        dataset=batches,
        iters=args.iterations,
        lr=args.learning_rate,
        seqlen=args.seq_len,
        nsamples=args.samples,
        batch_size=batch,
        device_map=args.device,
        amp=not args.no_amp,
        enable_torch_compile=False,  # at this size compiling takes longer than it saves
    )
    tuner.quantize()


PEERS: dict[str, Callable[[PreTrainedModel, torch.Tensor, argparse.Namespace], None]] = {
    "llmcompressor-rtn": run_rtn,
    "llmcompressor-gptq": run_gptq,
    "llmcompressor-gptq-mse": run_gptq_mse,
    "llmcompressor-awq": run_awq,
    "llmcompressor-awq-gptq": run_awq_gptq,
    "llmcompressor-smoothquant-gptq": run_smoothquant_gptq,
    "autoround": run_autoround,
}


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def write_back(quantized: PreTrainedModel, args: argparse.Namespace) -> int:
    """The peer's float weights in an untouched copy of the model, saved; returns how many linears changed."""
    plain = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    changed = 0
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            value = quantized.get_parameter(name).to("cpu", torch.float32)
            changed += name.endswith("proj.weight") and not torch.equal(parameter, value)
            parameter.copy_(value)
    plain.save_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.out)
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path, help="folder for the dequantized float model")
    parser.add_argument("--text", type=Path, required=True, help="running text to calibrate on")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64, help="0: one scale per output channel")
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--int8-activations", action="store_true", help="calibrate with int8 inputs per token")
    parser.add_argument("--batch-size", type=int, help="windows at a time; the peer's default otherwise")
    parser.add_argument("--iterations", type=int, default=200, help="AutoRound's steps per block")
    parser.add_argument("--learning-rate", type=float, help="AutoRound's; its recipe `light` is 50 steps at 0.005")
    parser.add_argument("--no-amp", action="store_true", help="AutoRound tunes in float32, not in bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.device == "cpu":
        # llm-compressor's AWQ pins memory whether or not there is an accelerator to copy it to, and torch then refuses.
        torch.Tensor.pin_memory = lambda tensor, *_: tensor
    ids = windows(AutoTokenizer.from_pretrained(args.model), args.text, args.samples, args.seq_len)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    started, cpu_before = time.monotonic(), cpu_seconds()
    PEERS[args.peer](model, ids, args)
    seconds, cpu = time.monotonic() - started, cpu_seconds()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = {
        "peer": args.peer,
        "version": version("auto-round" if args.peer == "autoround" else "llmcompressor"),
        "bits": args.bits,
        "group_size": args.group_size,
        "symmetric": args.symmetric,
        "int8_activations": args.int8_activations,
        "iterations": args.iterations if args.peer == "autoround" else None,
        "learning_rate": args.learning_rate,
        "device": args.device,
        "quantize_s": round(seconds, 1),
        "quantize_cpu_s": round(cpu - cpu_before, 1),
        "process_cpu_s": round(cpu, 1),
        "peak_rss_mb": round(memory / 1024),
        "peak_gpu_mb": round(torch.cuda.max_memory_allocated() / 2**20) if torch.cuda.is_available() else None,
        "windows_sha256": hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest(),
        "linears_changed": write_back(model, args),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print(json.dumps(result), flush=True)


main()
