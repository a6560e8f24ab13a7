"""Makes the checkpoints of this folder; README.md says with which versions. Usage: python make.py OUTPUT"""

import os
import sys
from pathlib import Path

# Its thread pools ask for more workers than it grants them on small machines.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "4")

import torch
from gptqmodel import GPTQModel, QuantizeConfig
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
    attention_bias=True,
)
RECIPES = {
    "gptq-act-order": QuantizeConfig(bits=4, group_size=32, desc_act=True, act_group_aware=False, sym=True),
    "gptq-v2-asym": QuantizeConfig(
        bits=3, group_size=32, desc_act=True, act_group_aware=False, sym=False, format="gptq_v2"
    ),
}


def save_float(folder: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            elif parameter.dim() == 2:
                parameter.normal_(0.0, 0.1)
    model.to(torch.float16).save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, CONFIG.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def save_expected(folder: Path, ids: torch.Tensor) -> None:
    """What transformers and GPTQModel's kernels make of the folder: two weights in float16, logits in float32."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    expected = {"input_ids": ids}
    # The int4 kernel reorders its codes when it is first used.
    for module in (f"model.layers.0.{name}" for name in ("self_attn.k_proj", "mlp.down_proj")):
        linear = loaded.get_submodule(module)
        weight = linear.dequantize_weight()[: linear.in_features].t()
        expected[f"{module}.weight"] = weight.to(torch.float16).contiguous()
    with torch.no_grad():
        expected["logits"] = loaded(ids).logits.to(torch.float32)
    save_file(expected, folder / "expected.safetensors")


def main(output: Path) -> None:
    save_float(output / "float")
    ids = torch.randint(3, CONFIG.vocab_size, (16, 64), generator=torch.Generator().manual_seed(0))
    calibration = [{"input_ids": row.tolist(), "attention_mask": [1] * 64} for row in ids]
    for name, recipe in RECIPES.items():
        model = GPTQModel.load(str(output / "float"), recipe)
        model.quantize(calibration, batch_size=1)
        model.save(str(output / name))
        save_expected(output / name, ids[:1, :16].contiguous())


main(Path(sys.argv[1]))
