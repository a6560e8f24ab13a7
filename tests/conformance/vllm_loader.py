"""vLLM's models on a CPU read folders and say the log-probabilities of a text's tokens.

Usage: python vllm_loader.py DTYPE IDS.safetensors FOLDER…; beside each folder comes `FOLDER.loaded.safetensors`
with `logprobs` [tokens - 1, vocab] of what follows each token of `ids`, and in its metadata who made the products.

vLLM's CPU kernel for 4-bit weights is built for AVX512 only. Where it is missing, a product in its place reads the
tensors just as vLLM has laid them out for the kernel, so that names, fusing, configs and repacking are still vLLM's.
"""

import gc
import os
import sys
from pathlib import Path

# vLLM reads these as it is imported; it would send statistics of its use.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms import current_platform

PER_WORD = 8


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """Fields of 4 bits along the last dimension, the lowest first."""
    fields = (words[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    return fields.flatten(-2)


def product(
    x: torch.Tensor,
    words: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    pack_factor: int,
    isa_hint: str,
) -> None:
    """`out` becomes x W; `words` are blocks of 16 output channels: row by row, two words each."""
    del isa_hint
    assert pack_factor == PER_WORD
    rows = x.shape[1]
    codes = unpacked(words.view(-1, rows, 2)).permute(1, 0, 2).reshape(rows, -1)
    zero = unpacked(zeros) if zeros is not None else torch.full_like(scales, 8)
    size = rows // len(scales)
    weight = (codes - zero.repeat_interleave(size, 0)).float() * scales.float().repeat_interleave(size, 0)
    result = x.float() @ weight
    out.copy_(result if bias is None else result + bias.float())


def replace_missing_kernel() -> torch.library.Library | None:
    """The library that holds `product`, which lives as long as it is held; None where vLLM has the kernel."""
    current_platform.import_kernels()
    if hasattr(torch.ops._C, "cpu_gemm_wna16"):
        return None
    library = torch.library.Library("_C", "FRAGMENT")
    library.define(
        "cpu_gemm_wna16(Tensor x, Tensor words, Tensor(a!) out, Tensor scales, Tensor? zeros, Tensor? bias, "
        "int pack_factor, str isa_hint) -> ()"
    )
    library.impl("cpu_gemm_wna16", product, "CPU")
    return library


def load(folder: Path, dtype: str, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of every token after each of `ids` but the last."""
    llm = LLM(str(folder), dtype=dtype, enforce_eager=True, max_model_len=128, max_logprobs=-1)
    asked = SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False)
    (answer,) = llm.generate({"prompt_token_ids": ids}, asked, use_tqdm=False)
    rows = [[row[token].logprob for token in range(len(row))] for row in answer.prompt_logprobs[1:]]
    return torch.tensor(rows)


def main() -> None:
    held = replace_missing_kernel()
    dtype, ids = sys.argv[1], load_file(sys.argv[2])["ids"][0].tolist()
    for folder in map(Path, sys.argv[3:]):
        note = {"kernel": "its own" if held is None else "a product of this test"}
        saved = folder.parent / f"{folder.name}.loaded.safetensors"  # vLLM reads whatever weights are in the folder
        save_file({"logprobs": load(folder, dtype, ids)}, saved, metadata=note)
        cleanup_dist_env_and_memory()
        gc.collect()


if __name__ == "__main__":
    main()
