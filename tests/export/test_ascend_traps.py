"""What the AscendV1 encoder refuses before any work, by runtime, and what its reader refuses of damaged folders."""

import dataclasses
from pathlib import Path

import pytest
import torch
from ascend_folders import (
    INT4,
    INT8,
    STATIC,
    STATIC_ASYM,
    TOKEN,
    by_suffix,
    edit_json,
    edit_tensors,
    group,
    input_of,
    packed_model,
    save_ascend,
)
from native_folders import save_native
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.errors import CheckpointError, UnsupportedError, UsageError
from cann_llm_quant.export.ascend import AscendEncoder
from cann_llm_quant.export.ascend_reader import AscendReader
from cann_llm_quant.export.layout import Encoder, Reader
from cann_llm_quant.export.layouts import ExportOptions, export_model
from cann_llm_quant.quant.activations import InputQuantizer, InputRange
from cann_llm_quant.quant.kv import KvPlan, KvScales, KvScheme, LayerKv
from cann_llm_quant.quant.scheme import ActivationScheme, QuantizedTensor, Scheme

LAYER = "model.layers.0"
EXPERT = f"{LAYER}.mlp.experts.0.up_proj"
DENSE = f"{LAYER}.self_attn.o_proj"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: save_tiny(root / family, family) for family in ("llama", "qwen2", "qwen3_moe", "mixtral")}


@pytest.fixture
def folder(models, tmp_path) -> Path:
    """A folder with static q, k, v (biases), dynamic o and float rest."""
    static = dict.fromkeys(("q_proj", "k_proj", "v_proj"), (INT8, STATIC_ASYM))
    save_ascend(models["qwen2"], tmp_path / "out", by_suffix(static | {"o_proj": (INT8, TOKEN)}))
    return tmp_path / "out"


def refused(runtime: str, module: str, scheme: Scheme, inputs: ActivationScheme | None, shape=(64, 128)) -> str:
    reason = AscendEncoder(runtime).refusal(module, scheme, inputs, shape)
    assert reason is not None
    assert "\n" not in reason
    return reason


def accepted(runtime: str, module: str, scheme: Scheme, inputs: ActivationScheme | None, shape=(64, 128)) -> bool:
    return AscendEncoder(runtime).refusal(module, scheme, inputs, shape) is None


def test_the_classes_are_what_the_converter_asks_for(folder):
    assert isinstance(AscendEncoder(), Encoder)
    assert isinstance(AscendReader(open_checkpoint(str(folder), accept_quantized=True)), Reader)


RUNTIMES = ("vllm-ascend-0.23", "vllm-ascend-0.25", "vllm-ascend-main", "mindie", "sglang")


@pytest.mark.parametrize(
    ("scheme", "inputs", "module", "loading"),
    [
        (INT8, TOKEN, DENSE, "11111"),
        (INT8, STATIC_ASYM, DENSE, "11111"),
        (INT8, None, DENSE, "11110"),
        (group(64), None, DENSE, "11010"),
        (group(64), TOKEN, DENSE, "11000"),
        (group(32), None, DENSE, "11000"),
        (INT4, None, DENSE, "00010"),
        (INT8, TOKEN, EXPERT, "11111"),
        (INT8, STATIC, EXPERT, "00000"),
        (INT8, None, EXPERT, "00000"),
        (INT4, TOKEN, EXPERT, "11111"),
        (INT4, None, EXPERT, "00000"),
        (Scheme("int4", False, "group", 64), None, DENSE, "00010"),
        (Scheme("int8", False, "channel", None), None, DENSE, "00010"),
        (Scheme("int8", False, "channel", None), TOKEN, DENSE, "00000"),
        (Scheme("int8", True, "group", 64), None, DENSE, "00000"),
        (Scheme("fp8_e4m3", True, "channel", None), None, DENSE, "00000"),
    ],
)
def test_each_runtime_gets_what_it_loads(scheme, inputs, module, loading):
    assert "".join("01"[accepted(runtime, module, scheme, inputs)] for runtime in RUNTIMES) == loading


@pytest.mark.parametrize(
    ("runtime", "module", "scheme", "inputs", "reason"),
    [
        ("vllm-ascend-main", DENSE, group(64), None, "vllm-ascend-0.25 is the last to load it"),
        ("vllm-ascend-0.23", DENSE, INT4, None, "has a scale a row, and dense W4A8_DYNAMIC linears have groups of 32"),
        ("vllm-ascend-0.23", DENSE, group(128), None, "has groups of 128 of 128 columns"),
        ("vllm-ascend-0.23", EXPERT, INT8, None, "loads routed experts as W4A8_DYNAMIC, W8A8_DYNAMIC; quantize its"),
        ("sglang", EXPERT, INT4, None, "which sglang quantizes in experts"),
        ("mindie", DENSE, Scheme("fp8_e4m3", True, "channel", None), None, "is fp8_e4m3-channel, and NPUs before"),
        ("vllm-ascend-0.23", DENSE, Scheme("int8", False, "channel", None), None, "has zero points, with which"),
        ("vllm-ascend-0.23", DENSE, Scheme("int8", True, "group", 64), None, "has a scale for 64 columns, and W8A16"),
        ("mindie", DENSE, group(32), None, "and mindie takes 64, 128, 256"),
        ("mindie", DENSE, INT8, ActivationScheme("int8", False), "has asymmetric int8 token inputs, and int8 weights"),
    ],
)
def test_refusals_end_a_sentence_about_the_linear(runtime, module, scheme, inputs, reason):
    assert reason in refused(runtime, module, scheme, inputs)


def test_outputs_that_fill_no_word_and_unknown_runtimes():
    assert "has 60 outputs" in refused("vllm-ascend-0.23", DENSE, group(64), None, (60, 128))
    with pytest.raises(UsageError, match="choose from vllm-ascend-0"):
        AscendEncoder("vllm-ascend-9")


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("shape", [(64, 128), (64, 96), (60, 64), (576, 1536)])
def test_the_nearest_scheme_is_never_refused(runtime, shape):
    encoder = AscendEncoder(runtime)
    inputs = TOKEN if runtime == "sglang" else None
    for scheme in (INT4, group(32), Scheme("int8", False, "group", 32), Scheme("fp8_e4m3", True, "tile", None)):
        nearest = encoder.nearest(scheme, shape)
        assert nearest is not None
        assert encoder.refusal(DENSE, nearest, inputs, shape) is None


def check(source: Path, choose, runtime: str = "vllm-ascend-0.23", kv: KvPlan | None = None, **changes) -> list[str]:
    model, _ = packed_model(source, choose, kv)
    return AscendEncoder(runtime).check(dataclasses.replace(model, **changes))


def test_c23_fused_linears_of_different_types_are_refused(models):
    with pytest.raises(UnsupportedError, match="q_proj W8A16, k_proj W8A16, v_proj W8A8_DYNAMIC"):
        check(models["llama"], by_suffix({"q_proj": (INT8, None), "k_proj": (INT8, None), "v_proj": (INT8, TOKEN)}))
    with pytest.raises(UnsupportedError, match="gate_proj FLOAT, up_proj W8A16"):
        check(models["llama"], by_suffix({"up_proj": (INT8, None)}))


def test_one_group_size_for_all_int4_weights(models):
    choose = by_suffix({"o_proj": (group(32), None), "down_proj": (group(48), None)})
    with pytest.raises(UnsupportedError, match="--regroup 32"):
        check(models["llama"], choose)


def test_biases_of_int4_linears_are_left_out_by_vllm_ascend(models):
    choose = by_suffix(dict.fromkeys(("q_proj", "k_proj", "v_proj"), (group(32), None)))
    with pytest.raises(UnsupportedError, match="q_proj has a bias"):
        check(models["qwen2"], choose)
    assert check(models["llama"], choose) == []


def test_int4_linears_with_quantized_inputs_are_warned_of(models):
    (warning,) = check(models["llama"], by_suffix({"o_proj": (group(32), TOKEN)}))
    assert "computes them in float" in warning
    (warning,) = check(models["llama"], by_suffix({"o_proj": (INT8, None)}), "mindie")
    assert "ATB models" in warning


def test_static_inputs_need_a_model_of_16_bits(models):
    choose = by_suffix({"o_proj": (INT8, STATIC)})
    with pytest.raises(UnsupportedError, match="bfloat16 or float16 model"):
        check(models["llama"], choose, dtype=torch.float32)


def test_experts_of_one_layer_share_a_type_and_families_differ(models):
    all_experts = lambda module: (INT8, TOKEN) if ".experts." in module else None  # noqa: E731
    assert check(models["qwen3_moe"], all_experts) == []
    with pytest.raises(UnsupportedError, match="finds no quantized experts of mixtral"):
        check(models["mixtral"], all_experts)
    assert check(models["mixtral"], all_experts, "sglang") == []
    some = lambda module: (INT8, TOKEN) if ".experts.0." in module else None  # noqa: E731
    with pytest.raises(UnsupportedError, match="must have one type"):
        check(models["qwen3_moe"], some)


def test_a_float_sibling_with_the_same_beginning_is_refused(models):
    model, arch = packed_model(models["llama"], by_suffix({"o_proj": (INT8, TOKEN)}))
    layer = arch.layers[0]
    gate = dataclasses.replace(layer.parameters[0], name=f"{DENSE}_norm.weight")
    layers = (dataclasses.replace(layer, parameters=(*layer.parameters, gate)), *arch.layers[1:])
    odd = dataclasses.replace(model, arch=dataclasses.replace(arch, layers=layers))
    with pytest.raises(UnsupportedError, match="o_proj would be loaded as float"):
        AscendEncoder().check(odd)


def test_embeddings_and_heads(models):
    model, _ = packed_model(models["llama"], lambda module: None)
    with pytest.raises(UnsupportedError, match="embeddings in float"):
        AscendEncoder().check(dataclasses.replace(model, schemes={"model.embed_tokens": INT8}))
    head = dataclasses.replace(model, schemes={"lm_head": INT8}, activations={"lm_head": TOKEN})
    assert AscendEncoder().check(head) == []
    with pytest.raises(UnsupportedError, match="head in float"):
        AscendEncoder("sglang").check(head)


def test_c24_fused_linears_share_one_input_range(models):
    choose = by_suffix(dict.fromkeys(("q_proj", "k_proj", "v_proj"), (INT8, STATIC)))
    model, _ = packed_model(models["llama"], choose)
    other = f"{LAYER}.self_attn.v_proj"

    def inputs(module: str) -> InputQuantizer:
        return InputQuantizer(STATIC, InputRange(torch.tensor([0.5 if module == other else 0.25])))

    with pytest.raises(
        UnsupportedError, match=r"v_proj has input scale 0\.5 .*q_proj has 0\.25 .* calibrate them as one"
    ):
        AscendEncoder(inputs=inputs).check(model)
    other = "none"
    assert AscendEncoder(inputs=inputs).check(model) == AscendEncoder().check(model)


def test_c24_is_seen_before_work_and_in_the_same_words_each_time(tmp_path):
    """Linears are encoded by several threads: none of them may find the difference first."""
    model = save_tiny(tmp_path / "m", num_hidden_layers=1)
    source = save_native(model, tmp_path / "q", INT8, STATIC)
    loaded = load_file(source / "model.safetensors")
    stored = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in loaded.items()}
    scales = {name.replace("weight_scale", "input_scale") for name in stored if name.endswith("weight_scale")}
    stored |= {name: torch.tensor([0.5 if "q_proj" in name else 0.25]) for name in scales}
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    steps: list[int] = []
    with pytest.raises(UnsupportedError, match=r"k_proj has input scale 0\.25 .*q_proj has 0\.5 "):
        export_model(source, tmp_path / "out", "ascend", ExportOptions(), progress=lambda done, _: steps.append(done))
    assert not steps


def test_a_bias_beyond_int32_and_scattered_groups_are_refused(models):
    model, _ = packed_model(models["llama"], by_suffix({"o_proj": (INT8, STATIC), "down_proj": (group(32), None)}))
    encoder = AscendEncoder()
    encoder.check(model)
    tiny = QuantizedTensor(torch.zeros(64, 64, dtype=torch.int8), torch.full((64, 1), 1e-9), None, INT8)
    with pytest.raises(UnsupportedError, match="too large for quant_bias"):
        encoder.encode(DENSE, tiny, input_of(STATIC), torch.ones(64))
    index = torch.arange(96, dtype=torch.int32) % 3
    scattered = QuantizedTensor(torch.zeros(64, 96, dtype=torch.int8), torch.ones(64, 3), None, group(32), None, index)
    with pytest.raises(UnsupportedError, match="g_idx"):
        encoder.encode(f"{LAYER}.mlp.down_proj", scattered, None, None)


@pytest.mark.parametrize("scheme", [KvScheme("fp8_e4m3"), KvScheme("int8", False)])
def test_caches_other_than_c8_are_refused(models, scheme):
    ones, zeros = torch.full((1, 1, 1), 2.0), torch.zeros(1, 1, 1, dtype=torch.int32)
    scales = KvScales(ones, None if scheme.symmetric else zeros, ones, None if scheme.symmetric else zeros)
    plan = KvPlan((LayerKv(scheme, scheme),) * 2, (scales,) * 2)
    with pytest.raises(UnsupportedError, match=rf"layer 0 keeps K of the KV cache in {scheme.label()}"):
        check(models["llama"], lambda module: None, kv=plan)
    model, _ = packed_model(models["llama"], lambda module: None, plan)
    assert AscendEncoder(kv_cache=False).check(model) == []


def test_a_cache_without_stored_scales_is_left_out_and_said(models):
    scheme = KvScheme("int8", strategy="token", dynamic=True)
    plan = KvPlan((LayerKv(scheme, scheme),) * 2, (KvScales(),) * 2)
    (warning,) = check(models["llama"], lambda module: None, kv=plan)
    assert "keep it in float" in warning


def test_c8_warns_of_head_sizes_and_pages_and_is_nothing_for_sglang(models):
    scheme = KvScheme("int8", strategy="channel")
    scales = KvScales(k_scale=torch.ones(2, 1, 16), v_scale=torch.ones(2, 1, 16))
    plan = KvPlan((LayerKv(scheme, scheme), LayerKv()), (scales, KvScales()), sink_tokens=4)
    pages, heads = check(models["llama"], lambda module: None, kv=plan)
    assert "left out" in pages
    assert "this model's have 16" in heads
    with pytest.raises(UnsupportedError, match="sglang has no int8 KV cache"):
        check(models["llama"], lambda module: None, "sglang", kv=plan)
    half = KvPlan((LayerKv(scheme, None), LayerKv()), (scales, KvScales()))
    with pytest.raises(UnsupportedError, match="keeps V of the KV cache in the compute type"):
        check(models["llama"], lambda module: None, kv=half)


def described(change):
    return lambda folder: edit_json(folder / "quant_model_description.json", change)


def stored(change):
    return lambda folder: edit_tensors(folder, change)


Q = f"{LAYER}.self_attn.q_proj"
O = f"{LAYER}.self_attn.o_proj"  # noqa: E741


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (
            described(lambda d: d.update(version="2.0.0")),
            UnsupportedError,
            r"version 2\.0\.0 .* reads 1\.0\.0 and 0\.0\.0",
        ),
        (
            described(lambda d: d.pop(f"{Q}.weight")),
            CheckpointError,
            r"does not name model.layers.0.self_attn.q_proj.weight",
        ),
        (described(lambda d: d.pop("model.norm.weight")), CheckpointError, "does not name model.norm.weight"),
        (described(lambda d: d.update({"model.x.weight": "W8A8"})), CheckpointError, "names model.x.weight"),
        (described(lambda d: d.update({f"{O}.weight": "W8A8_MXFP8"})), UnsupportedError, "is W8A8_MXFP8"),
        (described(lambda d: d.update({f"{O}.weight": "W8A8"})), CheckpointError, "o_proj.input_scale is missing"),
        (described(lambda d: d.update(group_size="x")), CheckpointError, "group_size"),
        (described(lambda d: d.update(fa_quant_type="FAKQuant")), UnsupportedError, "FAKQuant"),
        (described(lambda d: d.update(kv_cache_type="C4")), UnsupportedError, "C4"),
        (
            described(lambda d: d.update(metadata={"quarot": {"heads_rotation": {"layers": ["a"]}}})),
            UnsupportedError,
            "heads_rotation",
        ),
        (stored(lambda t: t.update({f"{O}.weight_scale": torch.ones(3, 1)})), CheckpointError, r"is \[3, 1\]"),
        (stored(lambda t: t.update({f"{O}.weight": torch.ones(64, 64)})), CheckpointError, "expected int8"),
        (stored(lambda t: t[f"{O}.weight_offset"].add_(1)), UnsupportedError, "weight_offset is not 0"),
        (stored(lambda t: t[f"{Q}.input_offset"].add_(0.5)), CheckpointError, "input_offset"),
        (stored(lambda t: t[f"{Q}.input_scale"].zero_()), CheckpointError, "input_scale 0"),
    ],
)
def test_c25_folders_that_contradict_themselves_are_refused_when_opened(folder, damage, error, message):
    damage(folder)
    with pytest.raises(error, match=message) as caught:
        AscendReader(open_checkpoint(str(folder), accept_quantized=True))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["deq_scale", "quant_bias", "input_scale", "input_offset"])
def test_c25_a_missing_side_tensor_is_named(folder, suffix):
    name = f"{Q}.{suffix}"
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    edit_json(folder / "quant_model_description.json", lambda document: document.pop(name))
    with pytest.raises(CheckpointError, match=f"{Q}.{suffix} is missing"):
        AscendReader(open_checkpoint(str(folder), accept_quantized=True))


@pytest.mark.parametrize(
    ("module", "damage", "message"),
    [
        (Q, lambda t: t[f"{Q}.deq_scale"].mul_(2), "deq_scale is not"),
        (Q, lambda t: t[f"{Q}.quant_bias"].add_(3), "quant_bias does not hold"),
        (O, lambda t: t[f"{O}.weight_scale"].fill_(float("nan")), "weight_scale is not positive"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused_when_read(folder, module, damage, message):
    edit_tensors(folder, damage)
    reader = AscendReader(open_checkpoint(str(folder), accept_quantized=True))
    with pytest.raises(CheckpointError, match=message):
        reader.quantized(module)


def test_a_bias_in_quant_bias_alone_is_refused_and_a_missing_weight_scale_is_not(folder):
    reader = AscendReader(open_checkpoint(str(folder), accept_quantized=True))
    whole = reader.quantized(Q)
    gone = [f"{Q}.weight_scale", f"{Q}.weight_offset"]
    edit_tensors(folder, lambda tensors: [tensors.pop(name) for name in gone])
    edit_json(folder / "quant_model_description.json", lambda document: [document.pop(name) for name in gone])
    rebuilt = AscendReader(open_checkpoint(str(folder), accept_quantized=True)).quantized(Q)
    assert torch.equal(rebuilt.codes, whole.codes)
    torch.testing.assert_close(rebuilt.scale, whole.scale, rtol=2.0**-22, atol=0)
    edit_tensors(folder, lambda tensors: tensors.pop(f"{Q}.bias"))
    edit_json(folder / "quant_model_description.json", lambda document: document.pop(f"{Q}.bias"))
    with pytest.raises(UnsupportedError, match="add the float tensor"):
        AscendReader(open_checkpoint(str(folder), accept_quantized=True)).quantized(Q)


def test_files_of_the_old_version_hold_one_code_a_byte(models, tmp_path):
    written = save_ascend(models["llama"], tmp_path / "out", by_suffix({"o_proj": (group(32), None)}))

    def unpack(tensors):
        for module, weight in written.items():
            tensors[f"{module}.weight"] = weight.codes
            del tensors[f"{module}.scale_bias"]

    edit_tensors(tmp_path / "out", unpack)

    def older(document):
        del document["version"]
        for module in written:
            del document[f"{module}.scale_bias"]

    edit_json(tmp_path / "out/quant_model_description.json", older)
    reader = AscendReader(open_checkpoint(str(tmp_path / "out"), accept_quantized=True))
    for module, weight in written.items():
        assert reader.linears[module].shape == weight.shape
        assert torch.equal(reader.quantized(module).dequantize(), weight.dequantize())


def test_corrections_beside_norms_are_refused(folder):
    name = f"{LAYER}.input_layernorm.bias"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(64)}))
    edit_json(folder / "quant_model_description.json", lambda document: document.update({name: "FLOAT"}))
    with pytest.raises(UnsupportedError, match="corrects activations"):
        AscendReader(open_checkpoint(str(folder), accept_quantized=True))
