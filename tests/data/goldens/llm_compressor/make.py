"""Makes the checkpoints of this folder; README.md says with which versions. Usage: python make.py OUTPUT"""

import sys
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
FP8_KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def int4(symmetric: bool) -> dict[str, QuantizationScheme]:
    weights = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32, symmetric=symmetric)
    return {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}


RECIPES = {
    "w4a16-gptq": GPTQModifier(config_groups=int4(True), ignore=["lm_head"]),
    "w4a16-asym-kv8": QuantizationModifier(config_groups=int4(False), ignore=["lm_head"], kv_cache_scheme=FP8_KV),
    "w8a8": QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]),
    "fp8": QuantizationModifier(targets="Linear", scheme="FP8", ignore=["lm_head"]),
}


def main(output: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = torch.randint(3, CONFIG.vocab_size, (16, 1, 64), generator=generator)
    data = DataLoader([{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in samples], batch_size=None)
    # oneshot wants one, and reads nothing from it: the samples are token ids already
    processor = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")))
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(output / "float")
    for name, recipe in RECIPES.items():
        model = LlamaForCausalLM.from_pretrained(output / "float", dtype=torch.bfloat16)
        oneshot(
            model=model,
            processor=processor,
            dataset=data,
            recipe=recipe,
            num_calibration_samples=16,
            max_seq_length=64,
        )
        model.save_pretrained(output / name, save_compressed=True)


main(Path(sys.argv[1]))
