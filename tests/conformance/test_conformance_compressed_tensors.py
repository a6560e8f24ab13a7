"""transformers with compressed-tensors reads our files as we do, and we read llm-compressor's as it does.

Weights alone: the logits agree to float32's last digits. Where inputs are quantized too, both sides round them, and a
number that lies on the edge between two codes may fall either way; the mean square of the difference is then compared
with what rounding the inputs changes at all. Experts and asymmetric weights are dequantized there as they are loaded,
into bfloat16, the type of their scales, and here for this comparison as well.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from native_folders import save_native
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

from cann_llm_quant.calibrate.streamed_logits import StreamedLogits
from cann_llm_quant.export.layouts import ExportOptions, export_model
from cann_llm_quant.export.packed import open_packed
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.quant.scheme import ActivationScheme, Scheme

GOLDENS = Path(__file__).resolve().parents[1] / "data/goldens/llm_compressor"
IDS = torch.randint(3, 64, (1, 32), generator=torch.Generator().manual_seed(3))
ODD = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
INT4, INT4_ASYM = Scheme("int4", True, "group", 32), Scheme("int4", False, "group", 32)
W8 = Scheme("int8", True, "channel", None)
FP8_TILE = Scheme("fp8_e4m3", True, "tile", None)
MODELS: dict[str, tuple[str, dict[str, Any], Scheme]] = {
    "llama-bias-gqa-odd": ("llama", ODD | {"attention_bias": True, "mlp_bias": True}, INT4),
    "llama-tied-w3": ("llama", {"tie_word_embeddings": True}, Scheme("int3", True, "group", 32)),
    "qwen2-asym": ("qwen2", {}, INT4_ASYM),
    "qwen3-tile": ("qwen3", {"head_dim": 32}, FP8_TILE),
    "mixtral-w4": ("mixtral", {}, INT4),
    "qwen2_moe-w4": ("qwen2_moe", {}, INT4),
    "qwen3_moe-w8": ("qwen3_moe", {}, W8),
}


class Rounding(PackedCheckpoint[Any]):
    """A packed checkpoint, weights whose name holds `where` rounded to bfloat16."""

    where = ""

    def load(self, name: str) -> Tensor:
        tensor = super().load(name)
        rounds = self.quantized(name.removesuffix(".weight")) is not None and self.where in name
        return tensor.to(torch.bfloat16).to(tensor.dtype) if rounds else tensor


def ours(folder: Path, rounded: str | None = None) -> Tensor:
    """Our logits in float32, inputs quantized as the files say; weights whose name holds `rounded` as bfloat16."""
    with open_packed(folder) as checkpoint:
        view = Rounding(checkpoint.inner, checkpoint.reader)
        view.where = "no such weight" if rounded is None else rounded
        arch = arch_from_checkpoint(view)
        stream = StreamedLogits(view, arch, device=torch.device("cpu"), dtype=torch.float32, budget=1 << 30)
        return torch.stack(list(stream(IDS)))


def theirs(folder: Path, *, dequantize: bool = False) -> Tensor:
    """Logits of transformers in float32; asymmetric weights it can only dequantize at once (5.24)."""
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name and parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.to(torch.float32)  # stay in bfloat16 whatever dtype says
        return model(IDS).logits


def loss(logits: Tensor) -> float:
    """Mean negative log-likelihood of each token after the first."""
    return float(torch.nn.functional.cross_entropy(logits[0, :-1].to(torch.float64), IDS[0, 1:]))


@pytest.mark.parametrize("name", MODELS)
def test_our_exports_are_read_as_we_read_them(tmp_path: Path, name: str, record_property: Any) -> None:
    family, config, scheme = MODELS[name]
    model = save_tiny(tmp_path / "m", family, num_hidden_layers=1, **config)
    native = save_native(model, tmp_path / "native", scheme)
    out = export_model(native, tmp_path / "out", "compressed-tensors", ExportOptions()).path
    rounded = ".experts." if family in ("mixtral", "qwen2_moe", "qwen3_moe") else None if scheme.symmetric else ""
    expected, mine = theirs(out, dequantize=not scheme.symmetric), ours(out, rounded)
    difference = float((mine - expected).abs().max())
    row = {"target": "compressed-tensors", "model": name, "consumer": "transformers", "difference": difference}
    record_property("conformance", row)
    assert difference < 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("name", ["w4a16-gptq", "w4a16-asym-kv8"])
def test_files_of_llm_compressor_have_the_logits_and_the_loss_of_their_consumer(
    name: str, record_property: Any
) -> None:
    asymmetric = "asym" in name
    expected, mine = theirs(GOLDENS / name, dequantize=asymmetric), ours(GOLDENS / name, "" if asymmetric else None)
    difference = float((mine - expected).abs().max())
    row = {"target": "from llm-compressor", "model": name, "consumer": "transformers", "difference": difference}
    record_property("conformance", row)
    assert difference < 1e-4 * float(expected.abs().max())
    assert loss(mine) == pytest.approx(loss(expected), abs=1e-5)


@pytest.mark.parametrize("name", ["w8a8", "fp8"])
def test_files_with_quantized_inputs_have_the_loss_of_their_consumer(name: str, record_property: Any) -> None:
    expected, mine = theirs(GOLDENS / name), ours(GOLDENS / name)
    difference = float((mine - expected).abs().max())
    row = {"target": "from llm-compressor", "model": name, "consumer": "transformers", "difference": difference}
    record_property("conformance", row)
    plain = dequantized(GOLDENS / name)
    effect = float((plain - expected).square().mean())
    assert effect > 0  # inputs are quantized at all
    assert float((mine - expected).square().mean()) < 0.1 * effect
    assert loss(mine) == pytest.approx(loss(expected), abs=1e-3)


def dequantized(folder: Path) -> Tensor:
    """Logits of the same weights with inputs in float."""
    with open_packed(folder) as checkpoint:
        tensors = {name: checkpoint.load(name).to(torch.float32) for name in checkpoint.tensors}
    model = AutoModelForCausalLM.from_pretrained(GOLDENS / "float", dtype=torch.float32)
    assert tensors.keys() == load_file(GOLDENS / "float" / "model.safetensors").keys()
    model.load_state_dict(tensors)
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_c35_block_scaled_fp8_is_dequantized_as_transformers_does(
    tmp_path: Path, family: str, record_property: Any
) -> None:
    """The layout of DeepSeek and Qwen3, which transformers turns into bfloat16 where no GPU is."""
    pytest.importorskip("accelerate", reason="transformers reads FP8 with accelerate only")
    model = save_tiny(tmp_path / "m", family, num_hidden_layers=1, hidden_size=128, intermediate_size=256)
    native = save_native(model, tmp_path / "fp8", FP8_TILE)
    (native / "inference_config.json").unlink()
    stored = load_file(native / "model.safetensors")
    renamed = {name.replace(".weight_scale", ".weight_scale_inv"): tensor for name, tensor in stored.items()}
    save_file(renamed, native / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((native / "config.json").read_text(encoding="utf-8"))
    section = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config["quantization_config"] = section | {"modules_to_not_convert": ["lm_head"]}
    (native / "config.json").write_text(json.dumps(config), encoding="utf-8")
    loaded = AutoModelForCausalLM.from_pretrained(
        native, dtype=torch.bfloat16, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    weights = loaded.state_dict()
    with open_packed(native, dtype=None) as checkpoint:
        assert len(checkpoint.modules) == 7
        differences = [
            float((checkpoint.load(f"{m}.weight").float() - weights[f"{m}.weight"].float()).abs().max())
            for m in checkpoint.modules
        ]
    row = {"target": "from fp8", "model": f"{family}-tile", "consumer": "transformers", "of": "weights"}
    record_property("conformance", row | {"difference": max(differences)})
    assert max(differences) == 0


def test_inputs_of_our_w8a8_export_are_rounded_alike(tmp_path: Path, record_property: Any) -> None:
    model = save_tiny(tmp_path / "m", num_hidden_layers=1)
    native = save_native(model, tmp_path / "native", W8, ActivationScheme("int8"))
    plain = ours(save_native(model, tmp_path / "plain", W8))
    out = export_model(native, tmp_path / "out", "compressed-tensors", ExportOptions()).path
    expected, mine = theirs(out), ours(out)
    difference = float((mine - expected).abs().max())
    row = {"target": "compressed-tensors", "model": "llama-w8a8", "consumer": "transformers", "difference": difference}
    record_property("conformance", row)
    assert float((mine - expected).square().mean()) < 0.1 * float((plain - expected).square().mean())
