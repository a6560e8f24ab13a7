"""Train the demo model: a Llama of 0.94 M parameters and its byte-level BPE of 1024 tokens, on one core.

    python tools/build_demo_corpus.py --work build/demo
    python tools/train_demo_model.py --work build/demo

Every training window is the BOS token and 255 tokens of the stream `document EOS document EOS …`: what evaluation
feeds as well. AdamW with linear warm-up and cosine decay; the checkpoint of the lowest loss on the held-out text is
written into the package's data/demo_model/ in bfloat16, after each improvement, so that an interrupted run leaves
its best. Same seed, library versions and machine: same file.
"""

import argparse
import json
import math
import os
import platform
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "cann_llm_quant" / "data"
MODEL = DATA / "demo_model"

BOS, EOS = "<|bos|>", "<|eos|>"
BOS_ID, EOS_ID = 0, 1
VOCABULARY = 1024
CONTEXT = 256
MAX_POSITIONS = CONTEXT


@dataclass(frozen=True)
class Settings:
    """What decides the result, besides the text."""

    steps: int
    batch: int
    peak_rate: float
    warmup: int
    weight_decay: float
    evaluate_every: int
    seed: int


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Byte-level BPE that puts BOS first, ids 0 and 1 for BOS and EOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)]),
        ]
    )
    return tokenizer


def model_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


def token_stream(tokenizer: Tokenizer, documents: list[str]) -> Tensor:
    """The documents' ids, each followed by EOS, as one row."""
    encoded = tokenizer.encode_batch(documents, add_special_tokens=False)
    return torch.from_numpy(np.concatenate([np.array([*one.ids, EOS_ID]) for one in encoded]))


def windows_at(stream: Tensor, starts: Tensor) -> Tensor:
    """BOS and CONTEXT - 1 tokens of the stream from each start: [windows, CONTEXT]."""
    rows = stream[starts[:, None] + torch.arange(CONTEXT - 1)]
    return torch.cat([torch.full((len(starts), 1), BOS_ID), rows], dim=1)


def batches(stream: Tensor, settings: Settings, generator: torch.Generator) -> list[Tensor]:
    """Window starts of every step: whole passes over the stream, each pass shifted and shuffled anew."""
    starts: list[Tensor] = []
    needed = settings.steps * settings.batch
    while sum(map(len, starts)) < needed:
        shift = int(torch.randint(CONTEXT - 1, (1,), generator=generator))
        grid = torch.arange(shift, len(stream) - CONTEXT + 2, CONTEXT - 1)
        starts.append(grid[torch.randperm(len(grid), generator=generator)])
    return list(torch.cat(starts)[:needed].split(settings.batch))


def learning_rate(step: int, settings: Settings) -> float:
    if step < settings.warmup:
        return settings.peak_rate * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.peak_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def build_optimizer(model: LlamaForCausalLM, settings: Settings) -> torch.optim.AdamW:
    """Weight decay on matrices, none on norm vectors."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=settings.peak_rate,
        betas=(0.9, 0.95),
    )


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, windows: Tensor) -> float:
    """Mean cross entropy of the held-out windows, nats per token."""
    model.eval()
    losses = [float(model(input_ids=rows, labels=rows).loss) * len(rows) for rows in windows.split(16)]
    model.train()
    return sum(losses) / len(windows)


def train(model: LlamaForCausalLM, stream: Tensor, held_out: Tensor, settings: Settings, save: "Save") -> None:
    optimizer = build_optimizer(model, settings)
    generator = torch.Generator().manual_seed(settings.seed + 1)
    started, best, running = time.time(), math.inf, 0.0
    for step, starts in enumerate(batches(stream, settings, generator)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        rows = windows_at(stream, starts)
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running = loss.item() if step == 0 else 0.98 * running + 0.02 * loss.item()
        if (step + 1) % settings.evaluate_every == 0 or step + 1 == settings.steps:
            measured = held_out_loss(model, held_out)
            minutes = (time.time() - started) / 60
            print(f"step {step + 1} train {running:.4f} held-out {measured:.4f} {minutes:.1f} min", flush=True)
            if measured < best:
                best = measured
                save(step + 1, running, measured, minutes)


class Save:
    """Writes the model's folder: weights, configs, licence and provenance."""

    def __init__(self, model: LlamaForCausalLM, tokens: int, settings: Settings) -> None:
        self.model, self.tokens, self.settings = model, tokens, settings

    def __call__(self, step: int, train_loss: float, held_out: float, minutes: float) -> None:
        tensors = {
            name: tensor.to(torch.bfloat16).contiguous()
            for name, tensor in self.model.state_dict().items()
            if name != "lm_head.weight"
        }
        save_file(tensors, MODEL / "model.safetensors", metadata={"format": "pt"})
        (MODEL / "model.safetensors").chmod(0o644)
        text = provenance(step, train_loss, held_out, minutes, self.tokens, self.settings)
        (MODEL / "README.md").write_text(text, encoding="utf-8", newline="\n")


def provenance(step: int, train_loss: float, held_out: float, minutes: float, tokens: int, settings: Settings) -> str:
    seen = step * settings.batch * CONTEXT
    return f"""# The demo model

A Llama of 0.94 M parameters (hidden 192, 3 layers, 6 heads over 2 key/value heads of 32, tied embeddings) with a
byte-level BPE of 1024 tokens, small enough to ship and trained well enough to show what 4 bits cost. It writes
English that looks like Python documentation and knows nothing.

- Text: documentation of CPython's standard library, see `../text/README.md`; {tokens} training tokens.
- Made by: `python tools/build_demo_corpus.py --work W`, then `python tools/train_demo_model.py --work W
  --steps {settings.steps} --batch {settings.batch} --rate {settings.peak_rate} --seed {settings.seed}`.
- Training: one core, {step} of {settings.steps} steps of {settings.batch} windows of {CONTEXT} tokens
  ({seen / 1e6:.1f} M tokens, {seen / tokens:.1f} passes), AdamW, weight decay {settings.weight_decay}, cosine
  from {settings.peak_rate}, {minutes:.0f} minutes of wall time.
- Loss in nats per token: training {train_loss:.3f}, held-out text {held_out:.3f} (perplexity
  {math.exp(held_out):.2f}, windows of BOS and 255 tokens; it also chose the checkpoint).
- Versions: Python {platform.python_version()}, torch {torch.__version__},
  transformers {transformers.__version__}, tokenizers {tokenizers.__version__}; {date.today().isoformat()}.
- Licence: Apache-2.0 for the weights, PSF-2.0 for the text they were trained on: see `LICENSE`.
"""


LICENCE_NOTE = """\
The weights, the tokenizer and the configuration in this folder are part of cann-llm-quant and come under its licence,
Apache-2.0. They were trained on documentation of the Python standard library, whose licence is:

"""


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8", newline="\n")


def write_folder(tokenizer: Tokenizer) -> None:
    """Everything of the model's folder that does not depend on training."""
    MODEL.mkdir(parents=True, exist_ok=True)
    config = model_config().to_diff_dict()
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "tie_word_embeddings": True}
    config.pop("transformers_version", None)
    write_json(MODEL / "config.json", config)
    write_json(MODEL / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    tokenizer.save(str(MODEL / "tokenizer.json"))
    write_json(
        MODEL / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "model_max_length": MAX_POSITIONS,
            "clean_up_tokenization_spaces": False,
        },
    )
    licence = LICENCE_NOTE + (DATA / "text" / "LICENSE").read_text(encoding="utf-8")
    (MODEL / "LICENSE").write_text(licence, encoding="utf-8", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder with train.jsonl")
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    settings = Settings(arguments.steps, arguments.batch, arguments.rate, 150, 0.1, 150, arguments.seed)

    os.nice(5)
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    with open(arguments.work / "train.jsonl", encoding="utf-8") as file:
        documents = [json.loads(line)["text"] for line in file]
    tokenizer = train_tokenizer(documents)
    write_folder(tokenizer)
    stream = token_stream(tokenizer, documents)
    held_out_text = (DATA / "text" / "heldout.txt").read_text(encoding="utf-8")
    held_out = token_stream(tokenizer, [held_out_text])
    held_out_windows = windows_at(held_out, torch.arange(0, len(held_out) - CONTEXT + 2, CONTEXT - 1))
    print(f"{len(stream)} training tokens, {len(held_out)} held-out tokens", flush=True)
    model = LlamaForCausalLM(model_config())
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    train(model, stream, held_out_windows, settings, Save(model, len(stream), settings))


if __name__ == "__main__":
    main()
