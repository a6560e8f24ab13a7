"""Scales of the KV cache in files: every spelling, both shapes, whole or refused; the plan rebuilt from them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from tiny_models import save_tiny

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.cli.main import main
from cann_llm_quant.errors import CheckpointError, UsageError
from cann_llm_quant.export.kv_cache import kv_plan, kv_plan_for
from cann_llm_quant.export.kv_scales import check_shapes, common_scheme, is_kv_scale, parse_scales, scales_bytes
from cann_llm_quant.export.quantization_config import quantization_config
from cann_llm_quant.kv_spec import parse_kv_spec
from cann_llm_quant.quant.kv import KvScales, KvScheme, LayerKv

FP8 = KvScheme("fp8_e4m3")
K, V = (0.25, 0.5), (0.125, 2.0)
SPELLINGS = {
    "vllm": ("self_attn.k_scale", "self_attn.v_scale"),
    "vllm, attention of its own": ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    "projections' outputs": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    "modelopt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("source"))


def with_scales(source: Path, folder: Path, scales: dict[str, torch.Tensor], scheme: object = "fp8") -> Path:
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    save_file(load_file(source / "model.safetensors") | scales, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if scheme == "fp8":
        config["quantization_config"] = quantization_config({}, [], kv=FP8)
    elif scheme is not None:
        config["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def table(names: tuple[str, str], shape: tuple[int, ...] = (1,), layers: int = 2) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{layer}.{name}": torch.full(shape, values[layer % 2], dtype=torch.bfloat16)
        for layer in range(layers)
        for name, values in zip(names, (K, V), strict=True)
    }


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_c39_every_spelling_and_both_shapes_are_applied(
    source: Path, tmp_path: Path, spelling: str, shape: tuple[int, ...]
) -> None:
    folder = with_scales(source, tmp_path / "model", table(SPELLINGS[spelling], shape))
    with open_checkpoint(str(folder), accept_quantized=True) as checkpoint:
        plan = kv_plan(checkpoint)
    assert plan.layers == (LayerKv(FP8, FP8),) * 2
    assert [scales.k_scale.item() for scales in plan.scales] == list(K)
    assert [scales.v_scale.item() for scales in plan.scales] == list(V)
    assert plan.scales[0].k_scale.shape == (1, 1, 1)


def test_c39_one_scale_for_both_is_applied_to_both(source: Path, tmp_path: Path) -> None:
    scales = {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(K[layer]) for layer in range(2)}
    with open_checkpoint(str(with_scales(source, tmp_path / "m", scales)), accept_quantized=True) as checkpoint:
        plan = kv_plan(checkpoint)
    assert [(s.k_scale.item(), s.v_scale.item()) for s in plan.scales] == [(k, k) for k in K]


def test_c39_other_tensors_are_no_scales() -> None:
    for name in (
        "model.layers.0.self_attn.k_proj.weight_scale",
        "model.layers.0.self_attn.k_proj.input_scale",
        "model.layers.0.self_attn.q_proj.output_scale",
        "model.layers.0.mlp.k_scale",
        "model.layers.x.self_attn.k_scale",
    ):
        assert not is_kv_scale(name)


def test_c39_a_table_that_is_not_whole_is_refused(source: Path, tmp_path: Path) -> None:
    whole = table(SPELLINGS["vllm"])
    name = "model.layers.1.self_attn.v_scale"
    cases = {
        "layer 1 has no v_scale": {key: value for key, value in whole.items() if key != name},
        r"model.layers.2.self_attn.k_scale is of no layer": table(SPELLINGS["vllm"], layers=3),
        r"v_scale has shape \[2\], expected one number": whole | {name: torch.ones(2)},
        "not positive and finite": whole | {name: torch.tensor(float("nan"))},
        "0.5 and .*k_scale is 0.25": whole | {"model.layers.0.self_attn.attn.k_scale": torch.tensor([0.5])},
    }
    for number, (words, scales) in enumerate(cases.items()):
        folder = with_scales(source, tmp_path / str(number), scales)
        with open_checkpoint(str(folder), accept_quantized=True) as checkpoint, pytest.raises(CheckpointError) as info:
            kv_plan(checkpoint)
        assert info.match(words) or info.match("0.25 and .* is 0.5"), words


def test_c63_a_table_of_ones_is_refused(source: Path, tmp_path: Path) -> None:
    ones = {name: torch.ones(1) for name in table(SPELLINGS["vllm"])}
    folder = with_scales(source, tmp_path / "model", ones)
    with open_checkpoint(str(folder), accept_quantized=True) as checkpoint, pytest.raises(CheckpointError) as info:
        kv_plan(checkpoint)
    assert info.match("all KV scales are 1.0, so nothing was calibrated")


def test_inspect_prints_a_table_and_says_what_is_wrong(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_scales(source, tmp_path / "model", table(SPELLINGS["vllm"]))
    assert main(["inspect", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["kv_cache"]
    assert (shown["scales"], shown["wanted"], shown["all_ones"]) == (4, 4, False)
    assert [(row["k_scale"], row["v_scale"]) for row in shown["rows"]] == list(zip(K, V, strict=True))
    broken = {"model.layers.0.self_attn.k_scale": torch.ones(1)}
    assert main(["inspect", str(with_scales(source, tmp_path / "broken", broken))]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "1 stored scales, 4 are needed, two a layer, all are 1.0, as if nothing had been calibrated" in text


def test_a_float_model_has_a_plain_plan_and_scales_wait_for_a_scheme(source: Path, tmp_path: Path) -> None:
    folder = with_scales(source, tmp_path / "model", table(SPELLINGS["vllm"]), scheme=None)
    with open_checkpoint(str(folder), accept_quantized=True) as checkpoint:
        assert not kv_plan(checkpoint).quantizes
        plan = kv_plan_for(checkpoint, parse_kv_spec("fp8_e4m3", 2))
        assert [scales.k_scale.item() for scales in plan.scales] == list(K)
        with pytest.raises(UsageError, match="has no calibrated scale"):
            kv_plan_for(checkpoint, parse_kv_spec("int8-tensor", 2))
    with open_checkpoint(str(source)) as checkpoint:
        assert kv_plan_for(checkpoint, parse_kv_spec("int4", 2)).quantizes


def test_a_scheme_of_another_tool_that_cannot_be_run_is_refused(source: Path, tmp_path: Path) -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head", "symmetric": True, "dynamic": False}
    folder = with_scales(source, tmp_path / "model", table(SPELLINGS["vllm"]), scheme=scheme)
    with open_checkpoint(str(folder), accept_quantized=True) as checkpoint, pytest.raises(CheckpointError) as info:
        kv_plan(checkpoint)
    assert info.match("attn_head.*is none that this version runs")


def test_the_file_of_scales_reads_back_bit_equal_and_damage_is_named() -> None:
    first = KvScales(torch.rand(2, 1, 4) + 0.1, torch.randint(-9, 9, (2, 1, 4), dtype=torch.int32), None, None)
    second = KvScales(None, None, torch.rand(1, 1, 1) + 0.1, None)
    data = scales_bytes([first, second])
    back = parse_scales(data, 2, "file")
    assert torch.equal(back[0].k_scale, first.k_scale)
    assert torch.equal(back[0].k_zero, first.k_zero)
    assert torch.equal(back[1].v_scale, second.v_scale)
    assert (back[0].v_scale, back[1].k_scale) == (None, None)
    with pytest.raises(
        CheckpointError, match=r"file holds layers\.1\.v_scale, which is no scale of a model of 1 layers"
    ):
        parse_scales(data, 1, "file")
    with pytest.raises(CheckpointError, match="file is not a safetensors file"):
        parse_scales(data[:-3], 2, "file")


def test_c63_a_file_of_ones_is_refused() -> None:
    data = scales_bytes([KvScales(torch.ones(2, 1, 4), torch.zeros(2, 1, 4, dtype=torch.int32))])
    with pytest.raises(CheckpointError, match=r"file: all KV scales are 1\.0, so nothing was calibrated"):
        parse_scales(data, 1, "file")
    assert parse_scales(data, 1, "file", allow_ones=True)[0].k_scale is not None


def test_zero_points_are_whole() -> None:
    data = save({"layers.0.k_scale": torch.rand(2, 1, 4) + 0.1, "layers.0.k_zero_point": torch.full((2, 1, 4), 0.5)})
    with pytest.raises(CheckpointError, match=r"layers\.0\.k_zero_point is torch\.float32, expected int32"):
        parse_scales(data, 1, "file")


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (
            KvScales(torch.ones(1, 1, 1)),
            r"file: layers\.0\.k_scale has shape \[1, 1, 1\], expected \[2",
        ),
        (
            KvScales(torch.ones(2, 1, 4), torch.zeros(1, 1, 1, dtype=torch.int32)),
            r"k_zero_point has shape \[1, 1, 1\], expected \[2, 1, 4\]",
        ),
        (KvScales(v_scale=torch.ones(2, 1, 4)), r"layers\.0\.v_scale belongs to a cache that has none"),
        (
            KvScales(v_zero=torch.zeros(1, dtype=torch.int32)),
            r"layers\.0\.v_zero_point belongs to a cache that has none",
        ),
    ],
)
def test_scales_of_another_scheme_are_refused_by_their_file(scales: KvScales, message: str) -> None:
    layer = LayerKv(
        KvScheme("int8", symmetric=False, strategy="channel"), KvScheme("int8", strategy="token", dynamic=True)
    )
    with pytest.raises(CheckpointError, match=message):
        check_shapes([layer], [scales], 2, 4, "file")


def test_compressed_tensors_can_say_one_scale_a_layer_and_no_more() -> None:
    assert common_scheme(parse_kv_spec("fp8_e4m3", 3)) == FP8
    assert common_scheme(parse_kv_spec("int8-tensor", 3)) == KvScheme("int8")
    for spec in ("int8", "fp8_e5m2", "fp8_e4m3-head", "int8-tensor-asym", "first 1: fp16, fp8_e4m3", "bf16"):
        assert common_scheme(parse_kv_spec(spec, 3)) is None, spec


def test_the_config_and_the_names_are_those_of_compressed_tensors(source: Path) -> None:
    from compressed_tensors.modeling import initialize_hooked_kv_cache
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.initialize import initialize_attn_qparams
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source)
    section = quantization_config({}, ["lm_head"], kv=KvScheme("int8"))
    config = QuantizationConfig.model_validate(section)
    assert config.kv_cache_scheme.num_bits == 8
    # What apply_quantization_config does for each attention; it finds none in transformers 5.24.
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            scheme = QuantizationScheme(targets=[], input_activations=config.kv_cache_scheme)
            initialize_hooked_kv_cache(model, module)
            initialize_attn_qparams(module, scheme, False)
    registered = {
        name: tuple(t.shape) for name, t in model.state_dict().items() if name.endswith(("k_scale", "v_scale"))
    }
    expected = {f"model.layers.{n}.self_attn.{side}_scale": (1,) for n in range(2) for side in "kv"}
    assert registered == expected
