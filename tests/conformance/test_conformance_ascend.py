"""Our AscendV1 folders, loaded and computed by vllm-ascend's own quantization methods, the NPU's operators stubbed.

Needs an unpacked wheel, see ascend_fetch.py. What our encoder refuses is shown to fail there, or to be wrong.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from ascend_folders import (
    INT4,
    INT8,
    STATIC_ASYM,
    TOKEN,
    by_suffix,
    edit_json,
    edit_tensors,
    group,
    input_of,
    save_ascend,
)
from safetensors.torch import load_file
from tiny_models import save_tiny
from torch import Tensor

from cann_llm_quant.export.ascend import AscendEncoder
from cann_llm_quant.quant.kv import KvPlan, KvScales, KvScheme, LayerKv
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme

HERE = Path(__file__).parent
CONSUMER = "vllm-ascend 0.23.0, its quantization methods"
ODD = {"hidden_size": 36, "intermediate_size": 52, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10}
GOLDENS = HERE.parent / "data" / "goldens" / "msmodelslim"
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
O, DOWN = "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"  # noqa: E741


@dataclass
class Run:
    """A folder, what we stored in it, and what vllm-ascend made of it."""

    folder: Path
    weights: Mapping[str, QuantizedTensor] = field(default_factory=dict)
    methods: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, Tensor] = field(default_factory=dict)


def all_types(down: Scheme) -> Callable:
    static = dict.fromkeys(QKV, (INT8, STATIC_ASYM))
    return by_suffix(
        static | dict.fromkeys(GATE_UP, (INT8, None)) | {"o_proj": (INT8, TOKEN), "down_proj": (down, None)}
    )


def c8() -> KvPlan:
    scheme = KvScheme("int8", strategy="channel")
    generator = torch.Generator().manual_seed(3)
    scales = KvScales(
        k_scale=torch.rand(2, 1, 16, generator=generator), v_scale=torch.rand(2, 1, 16, generator=generator)
    )
    return KvPlan((LayerKv(scheme, scheme), LayerKv()), (scales, KvScales()))


def build(root: Path) -> dict[str, Run]:
    """Every folder, loadable ones first; the others are made from loadable ones, as our encoder would refuse them."""
    sources = {family: save_tiny(root / family, family) for family in ("llama", "qwen2", "qwen3_moe", "mixtral")}
    sources["half"] = save_tiny(root / "half", "qwen2", dtype=torch.float16)
    sources["odd"] = save_tiny(root / "odd", "llama", attention_bias=True, mlp_bias=True, **ODD)
    sources["qwen3"] = save_tiny(root / "qwen3", "qwen3", head_dim=24)
    attention = dict.fromkeys((*QKV, "o_proj"), (group(32), None))
    int4_attention = by_suffix(attention | dict.fromkeys(GATE_UP, (INT8, TOKEN)) | {"down_proj": (INT8, STATIC_ASYM)})
    experts = lambda scheme: lambda module: (scheme, TOKEN) if ".experts." in module else None  # noqa: E731
    o4 = by_suffix({"o_proj": (group(32), None)})
    plans = {
        "qwen2": (sources["qwen2"], all_types(group(32)), AscendEncoder(), c8()),
        "qwen2 float16": (sources["half"], all_types(INT8), AscendEncoder("vllm-ascend-main"), None),
        "llama bias odd": (sources["odd"], lambda module: (INT8, TOKEN), AscendEncoder(), None),
        "qwen3": (sources["qwen3"], int4_attention, AscendEncoder(), None),
        "experts-int8": (sources["qwen3_moe"], experts(INT8), AscendEncoder(), None),
        "experts-int4": (sources["qwen3_moe"], experts(INT4), AscendEncoder(), None),
        "mixtral": (sources["mixtral"], experts(INT8), AscendEncoder("sglang"), None),
        "zero-points": (
            sources["llama"],
            by_suffix({"o_proj": (Scheme("int8", False, "channel", None), None)}),
            AscendEncoder("mindie"),
            None,
        ),
        **{name: (sources["llama"], o4, AscendEncoder(), None) for name in ("types", "bias", "channel", "sibling")},
    }
    runs = {
        name: Run(root / f"out-{name}", save_ascend(source, root / f"out-{name}", choose, encoder, kv))
        for name, (source, choose, encoder, kv) in plans.items()
    }
    spoil(runs)
    return runs | {"msmodelslim": Run(GOLDENS / "w8a16")}


def spoil(runs: Mapping[str, Run]) -> None:
    def description(name: str, change: Callable[[dict], None]) -> None:
        edit_json(runs[name].folder / "quant_model_description.json", change)

    description("types", lambda d: d.update({"model.layers.0.self_attn.q_proj.weight": "W8A8_DYNAMIC"}))
    description("channel", lambda d: d.update(group_size=0))
    description("sibling", lambda d: d.update({f"{O}_norm.weight": "FLOAT"}))
    description("bias", lambda d: d.update({f"{O}.bias": "FLOAT"}))
    edit_tensors(runs["bias"].folder, lambda tensors: tensors.update({f"{O}.bias": torch.full((64,), 100.0)}))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Run]:
    source = os.environ.get("CONFORMANCE_VLLM_ASCEND")
    if source is None:
        pytest.skip(
            "CONFORMANCE_VLLM_ASCEND names no unpacked wheel of vllm-ascend; see tests/conformance/ascend_fetch.py"
        )
    root = tmp_path_factory.mktemp("ascend")
    runs = build(root)
    pairs = [str(path) for name, run in runs.items() for path in (run.folder, root / f"{name}.safetensors")]
    command = [sys.executable, str(HERE / "ascend_loader.py"), source, *pairs]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, cwd=HERE).stdout
    for (name, run), found in zip(runs.items(), json.loads(answer.splitlines()[-1]), strict=True):
        run.methods, run.errors = found["methods"], found["errors"]
        run.outputs = load_file(root / f"{name}.safetensors")
    return runs


def static_input(x: Tensor) -> Tensor:
    """What the method makes of an input: it multiplies by the reciprocal of the scale, rounded to the model's type."""
    fixed = input_of(STATIC_ASYM).fixed
    scale, zero_point = fixed.scale.to(x.dtype), fixed.zero_point
    codes = (x.float() * (1 / scale).float() + zero_point).round().clamp(-128, 127)
    return (codes - zero_point).double() * scale.double()


def reference(run: Run, prefix: str, members: tuple[str, ...]) -> Tensor:
    """The product in float64 with our dequantized weights, on the input as the method quantizes it."""
    parent = prefix.rpartition(".")[0]
    modules = [f"{parent}.{member}" for member in members]
    x = run.outputs[f"{prefix}:x"].double()
    method = run.methods[prefix]
    if method == "AscendW8A8DynamicLinearMethod":
        step = x.abs().amax(-1, keepdim=True) / 127
        x = (x / step).round() * step
    elif method == "AscendW8A8LinearMethod":
        x = static_input(run.outputs[f"{prefix}:x"])
    w = torch.cat([run.weights[module].dequantize(torch.float64) for module in modules])
    stored = load_file(run.folder / "quant_model_weights.safetensors")
    bias = [stored.get(f"{module}.bias", torch.zeros(1)).expand(run.weights[module].shape[0]) for module in modules]
    return x @ w.T + torch.cat(bias).double()


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


DENSE = {
    "self_attn.qkv_proj": QKV,
    "self_attn.o_proj": ("o_proj",),
    "mlp.gate_up_proj": GATE_UP,
    "mlp.down_proj": ("down_proj",),
}


@pytest.mark.parametrize(
    ("name", "methods", "allowed"),
    [
        # outputs and, at load time, scales are rounded to the model's type
        ("qwen2", ("W8A8", "W8A8Dynamic", "W8A16", "W4A8Dynamic"), 0.004),
        ("qwen2 float16", ("W8A8", "W8A8Dynamic", "W8A16", "W8A16"), 0.0008),
        ("llama bias odd", ("W8A8Dynamic", "W8A8Dynamic", "W8A8Dynamic", "W8A8Dynamic"), 0.004),
        ("qwen3", ("W4A8Dynamic", "W4A8Dynamic", "W8A8Dynamic", "W8A8"), 0.004),
    ],
)
def test_every_type_is_computed_as_we_mean_it(runs, record_property, name, methods, allowed):
    run = runs[name]
    assert run.errors == {}
    worst = 0.0
    for layer in range(2):
        for (prefix, members), method in zip(DENSE.items(), methods, strict=True):
            full = f"model.layers.{layer}.{prefix}"
            assert run.methods[full] == f"Ascend{method}LinearMethod"
            worst = max(worst, error(run.outputs[f"{full}:y"], reference(run, full, members)))
    assert worst < allowed
    record_property("conformance", row(name, worst, "linears' outputs, relative"))


def row(model: str, difference: float, of: str) -> dict:
    return {"target": "ascend", "model": model, "consumer": CONSUMER, "difference": difference, "of": of}


def test_c8_scales_reach_the_attention(runs):
    run = runs["qwen2"]
    assert run.methods["model.layers.0.self_attn.attn"] == "AscendC8KVCacheAttentionMethod"
    assert "model.layers.1.self_attn.attn" not in run.methods
    for side in "kv":
        scale = getattr(c8().scales[0], f"{side}_scale").flatten()
        assert torch.equal(run.outputs[f"model.layers.0.self_attn.attn:{side}_cache_scale"], scale)
        assert not run.outputs[f"model.layers.0.self_attn.attn:{side}_cache_offset"].any()


def unpacked(words: Tensor) -> Tensor:
    codes = torch.stack([(words >> (4 * place)) & 15 for place in range(8)], dim=-1).flatten(-2)
    return torch.where(codes > 7, codes - 16, codes)


@pytest.mark.parametrize(("name", "method"), [("experts-int8", "AscendW8A8"), ("experts-int4", "AscendW4A8")])
def test_experts_become_the_weights_that_we_mean(runs, record_property, name, method):
    run = runs[name]
    assert run.errors == {}
    prefix, worst = "model.layers.1.mlp.experts", 0.0
    assert run.methods[prefix] == f"{method}DynamicFusedMoEMethod"
    for part, members in (("w13", GATE_UP), ("w2", ("down_proj",))):
        weight, scale = run.outputs[f"{prefix}:{part}_weight"], run.outputs[f"{prefix}:{part}_weight_scale"]
        codes = (unpacked(weight) if weight.dtype == torch.int32 else weight).float()
        scale = scale.to(torch.int32).view(torch.float32) if scale.dtype == torch.int64 else scale
        for expert in range(4):
            ours = torch.cat([run.weights[f"{prefix}.{expert}.{member}"].dequantize() for member in members])
            worst = max(worst, error((codes[expert] * scale[expert].view(1, -1)).T, ours.double()))
            if name == "experts-int4":
                bias = run.outputs[f"{prefix}:{part}_scale_bias"][expert]
                torch.testing.assert_close(bias, 8 * ours.sum(1), rtol=1e-4, atol=1e-3)
    assert worst < 1e-6
    record_property("conformance", row(f"qwen3_moe {name}", worst, "experts' weights, relative"))


def test_a_folder_of_msmodelslim_reads_the_same_there_and_here(runs, record_property):
    from cann_llm_quant.checkpoint import open_checkpoint
    from cann_llm_quant.export.ascend_reader import AscendReader

    run = runs["msmodelslim"]
    assert run.errors == {}
    reader = AscendReader(open_checkpoint(str(run.folder), accept_quantized=True))
    for prefix, module in (("model.layers.1.self_attn.o_proj",) * 2, ("model.layers.0.mlp.down_proj",) * 2):
        x, y = run.outputs[f"{prefix}:x"].double(), run.outputs[f"{prefix}:y"]
        difference = error(y, x @ reader.quantized(module).dequantize(torch.float64).T)
        assert difference < 0.004
    record_property("conformance", row("qwen2 by msModelSlim", difference, "linears' outputs, relative"))


def test_c23_different_types_of_fused_linears_raise_there(runs):
    assert "ValueError" in runs["types"].errors["model.layers.0.self_attn.qkv_proj"]


def test_int4_by_row_divides_by_zero_there(runs):
    assert runs["channel"].errors[O].startswith("ZeroDivisionError")


def test_experts_of_other_families_are_not_found_there(runs):
    assert runs["mixtral"].errors["model.layers.0.block_sparse_moe.experts"].startswith("KeyError")


def test_a_float_sibling_turns_a_linear_to_float_there(runs):
    assert runs["sibling"].methods[O] == "AscendUnquantizedLinearMethod"
    assert runs["types"].methods[O] == "AscendW4A8DynamicLinearMethod"


def test_biases_of_int4_linears_are_lost_there(runs):
    assert torch.equal(runs["bias"].outputs[f"{O}:y"], runs["types"].outputs[f"{O}:y"])


def test_zero_points_of_w8a16_are_added_there(runs):
    run = runs["zero-points"]
    assert error(run.outputs[f"{O}:y"], reference(run, O, ("o_proj",))) > 0.1
