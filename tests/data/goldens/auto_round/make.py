"""Makes the checkpoints of this folder; README.md says with which versions. Usage: python make.py OUTPUT"""

import json
import shutil
import sys
from pathlib import Path

import torch
from auto_round import AutoRound
from auto_round.export.export_to_awq.utils import dequantize_gemm
from auto_round_extension.torch import qlinear_torch as version_2
from auto_round_extension.torch import qlinear_torch_zp as version_1
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=True,
)
K, DOWN = "model.layers.0.self_attn.k_proj", "model.layers.0.mlp.down_proj"
# Format, and what is asked of AutoRound.
FOLDERS = {
    "awq": ("auto_awq", {"sym": False}),
    "auto-round-v2-w2": ("auto_round", {"sym": False, "bits": 2}),
    "auto-round-v2-w5": ("auto_round", {"sym": False, "bits": 5}),
    "auto-round-mixed": (
        "auto_round",
        {"layer_config": {DOWN: {"bits": 8}, K: {"group_size": 16, "sym": False}, "o_proj": {"bits": 16}}},
    ),
}


def save_float(folder: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.1)
    model.to(torch.float16).save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, CONFIG.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def save_expected(folder: Path) -> None:
    """Two weights [out, in] in float16, as AutoRound's code unpacks the stored tensors."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    packing, stored, expected = config.get("packing_format", "auto_awq"), load_file(folder / "model.safetensors"), {}
    for module in (K, DOWN):
        parts = {part: stored[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales")}
        own = config | config.get("extra_config", {}).get(module, {})
        bits, size = own["bits"], own["group_size"]
        if packing.endswith("awq"):
            weight = dequantize_gemm(*parts.values(), bits, size)
        else:
            kind = version_2 if packing == "auto_round" else version_1
            columns, rows = len(parts["qweight"]) * 32 // bits, parts["qweight"].shape[1]
            linear = kind.QuantLinear(bits, size, columns, rows, bias=False)
            linear.load_state_dict(parts, strict=False)
            linear.post_init()
            with torch.no_grad():
                weight = linear(torch.eye(columns, dtype=torch.float16))
        expected[f"{module}.weight"] = weight.t().contiguous()
    save_file(expected, folder / "expected.safetensors")


def main(output: Path) -> None:
    save_float(output / "float")
    for name, (form, options) in FOLDERS.items():
        model = AutoModelForCausalLM.from_pretrained(output / "float", dtype=torch.float16)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(output / "float")
        options = {"bits": 4, "group_size": 32, "sym": True, "iters": 0, "disable_opt_rtn": True} | options
        AutoRound(model, tokenizer, device_map="cpu", **options).quantize_and_save(str(output / "made"), format=form)
        (made,) = (output / "made").iterdir()
        shutil.move(made, output / name)
        save_expected(output / name)


main(Path(sys.argv[1]))
