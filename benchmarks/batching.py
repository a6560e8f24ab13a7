"""What continuous batching gains: tokens per second of N requests at once, beside the same requests one at a time.

    python benchmarks/batching.py [--requests 8] [--tokens 16] [--quantize] [--threads 1]

The model is a random Llama of 1.1 billion parameters (the shape of TinyLlama), whose weights are larger than any cache
of a CPU: one request alone waits for memory, and eight read each weight once for all. Both figures come from one
process, alternating, and count decoding only (from each request's first new token on); every answer is compared.
`--quantize` packs the linears to 4 bits first, where unpacking takes the place of reading.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from cann_llm_quant.pipeline import RunOptions, quantize_model
from cann_llm_quant.recipe import validate_recipe
from cann_llm_quant.runner import LLMEngine

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
PROMPT = 32


def save_model(folder: Path) -> None:
    """The random model, in bfloat16."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(int(SHAPE["vocab_size"]))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def decode(engine: LLMEngine, prompts: list[list[int]], tokens: int) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds from the moment when all prompts are computed to the last token, and the answers."""
    handles = [engine.submit(prompt, tokens + 1, ignore_eos=True) for prompt in prompts]
    streams = [iter(handle) for handle in handles]
    first = [next(stream).token_id for stream in streams]
    started = time.perf_counter()
    rest = [[chunk.token_id for chunk in stream] for stream in streams]
    seconds = time.perf_counter() - started
    return seconds, [tuple(t for t in (head, *tail) if t is not None) for head, tail in zip(first, rest, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quantize", action="store_true")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        save_model(folder)
        if args.quantize:
            recipe = validate_recipe({"method": "rtn", "scheme": {"bits": 4, "group_size": 64}}, "this benchmark")
            quantize_model(str(folder), Path(scratch) / "packed", recipe, options=RunOptions())
            folder = Path(scratch) / "packed"
        options: dict[str, Any] = {"max_batch_size": args.requests, "max_context": PROMPT + args.tokens + 1}
        with LLMEngine(folder, dtype=args.dtype, prefix_cache=False, **options) as engine:
            source = torch.Generator().manual_seed(1)
            prompts = torch.randint(10, 32000, (args.requests, PROMPT), generator=source).tolist()
            alone, together = [], []
            for _ in range(args.rounds):
                parts = [decode(engine, [prompt], args.tokens) for prompt in prompts]
                alone.append(args.requests * args.tokens / sum(seconds for seconds, _ in parts))
                seconds, answers = decode(engine, prompts, args.tokens)
                together.append(args.requests * args.tokens / seconds)
                same = sum(answer == part[1][0] for answer, part in zip(answers, parts, strict=True))
    one, many = statistics.median(alone), statistics.median(together)
    result = {
        "parameters": "1.1e9, random",
        "weights": "int4 g64" if args.quantize else args.dtype,
        "requests": args.requests,
        "tokens_each": args.tokens,
        "threads": args.threads,
        "tokens_per_s_one_at_a_time": round(one, 2),
        "tokens_per_s_together": round(many, 2),
        "ratio": round(many / one, 2),
        "equal_answers": f"{same} of {args.requests}",
        "load_average": os.getloadavg()[0],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
