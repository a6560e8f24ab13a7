"""What `verify` must notice, one damage at a time; that it is silent about sound outputs, smoothed ones included."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from native_folders import round_weight, save_native
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny
from torch import Tensor

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.export.native_reader import open_native
from cann_llm_quant.export.verify import Verification, verify
from cann_llm_quant.export.verify_config import check_description
from cann_llm_quant.export.verify_files import is_inside
from cann_llm_quant.export.verify_findings import Findings
from cann_llm_quant.export.verify_folds import row_factors
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.quant.scheme import MXFP4, ActivationScheme, Scheme

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
GOLDEN = Path(__file__).resolve().parents[1] / "data/goldens/llm_compressor/w4a16-asym-kv8"
GATES = [f"model.layers.{layer}.mlp.gate_proj" for layer in (0, 1)]
INT4 = Scheme("int4", True, "group", 32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("verify") / "m")


@pytest.fixture(scope="module")
def sound(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = save_native(tiny, tmp_path_factory.mktemp("verify") / "out", INT4)
    write_sums(out)
    return out


@pytest.fixture
def out(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "out")
    return tmp_path / "out"


def write_sums(folder: Path) -> None:
    files = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def without_sums(folder: Path) -> Path:
    (folder / "SHA256SUMS").unlink()
    return folder


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return without_sums(folder)


def edit_json(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> Path:
    document = json.loads((folder / name).read_text(encoding="utf-8"))
    change(document)
    (folder / name).write_text(json.dumps(document), encoding="utf-8")
    return without_sums(folder)


def faults(result: Verification) -> list[str]:
    lines = [fault.line() for fault in result.findings.faults]
    assert all("\n" not in line for line in lines)
    return lines


def only(result: Verification, *words: str) -> str:
    """The one fault, which says all of the words."""
    (line,) = faults(result)
    for word in words:
        assert word in line
    return line


def test_a_sound_output_passes_with_its_errors_against_the_source(sound: Path, tiny: Path) -> None:
    result = verify(str(sound), str(tiny))
    assert faults(result) == []
    assert result.stages == ["files", "config", "numbers", "weights"]
    assert (result.layout, result.source, result.linears, result.schemes) == ("native", "float", 14, {INT4.label(): 14})
    assert result.sums == len(list(sound.iterdir())) - 1
    source = load_file(tiny / "model.safetensors")[f"{Q}.weight"].to(torch.float64)
    with open_native(sound) as checkpoint:
        distance = (checkpoint.load(f"{Q}.weight").to(torch.float64) - source).abs()
    rms = source.square().mean().sqrt()
    error = next(error for error in result.errors if error.module == Q)
    assert error.largest == pytest.approx(float(distance.max() / rms), rel=1e-5)
    assert error.mean == pytest.approx(float(distance.mean() / rms), rel=1e-5)
    assert error.error == pytest.approx(float(distance.square().mean().sqrt() / rms), rel=1e-5)
    assert len(result.errors) == 16
    head = next(error for error in result.errors if error.module == "lm_head")
    assert (head.scheme, head.largest) == ("float", 0.0)


def test_a_flipped_byte_is_named_by_its_file(out: Path) -> None:
    data = bytearray((out / "model.safetensors").read_bytes())
    data[-1000] ^= 1
    (out / "model.safetensors").write_bytes(data)
    only(verify(str(out)), "model.safetensors: is not what was written", "SHA256SUMS")


def test_a_flipped_bit_is_named_by_its_linear_against_a_quantized_source(out: Path, sound: Path) -> None:
    edit_tensors(out, lambda t: t[f"{Q}.weight_packed"].bitwise_xor_(torch.tensor(1, dtype=torch.int32)))
    result = verify(str(out), str(sound))
    only(result, Q, "codes differ from the source's")
    assert [error.codes for error in result.errors if error.module == DOWN] == [True]


def test_c37_a_truncated_file_is_named_with_both_sizes(out: Path) -> None:
    data = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(data[:-1000])
    result = verify(str(without_sums(out)))
    only(result, "model.safetensors", "truncated", str(len(data)), str(len(data) - 1000))
    assert result.stages == ["files"]


def swap_rows(tensors: dict[str, Tensor]) -> None:
    """The two rows whose scales differ most exchange them."""
    scale = tensors[f"{DOWN}.weight_scale"]
    low, high = int(scale.float().mean(1).argmin()), int(scale.float().mean(1).argmax())
    scale[[low, high]] = 3 * scale[[high, low]]


def swap_linears(tensors: dict[str, Tensor]) -> None:
    first, second = (f"{module}.weight_scale" for module in GATES)
    tensors[first], tensors[second] = 3 * tensors[second], tensors[first] / 3


@pytest.mark.parametrize(("swap", "where"), [(swap_rows, [DOWN]), (swap_linears, GATES)], ids=["rows", "linears"])
def test_scales_that_belong_elsewhere_are_noticed(out: Path, tiny: Path, swap: Any, where: list[str]) -> None:
    lines = faults(verify(str(edit_tensors(out, swap)), str(tiny)))
    assert [line.partition(":")[0] for line in lines] == where
    assert all("no multiple near 1" in line for line in lines)


def test_a_damaged_scale_of_v_shows_where_it_is_consumed(out: Path, tiny: Path) -> None:
    """A row of v times 8 might be a folded factor, but then o would have to undo it."""

    def louder(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.v_proj.weight_scale"][:16] *= 8

    assert any(
        "layers.0.self_attn.o_proj" in line for line in faults(verify(str(edit_tensors(out, louder)), str(tiny)))
    )


@pytest.mark.parametrize("suffix", ["weight_packed", "weight_scale", "weight_shape"])
def test_a_missing_tensor_is_named(out: Path, suffix: str) -> None:
    lines = faults(verify(str(edit_tensors(out, lambda t: t.pop(f"{Q}.{suffix}")))))
    assert lines
    assert all(Q in line for line in lines)


def test_a_shape_that_is_no_whole_number_is_a_fault(out: Path) -> None:
    edit_tensors(out, lambda t: t.update({f"{Q}.weight_shape": torch.full((2,), float("nan"))}))
    only(verify(str(out)), f"{Q}.weight_shape must hold two numbers")


def test_a_missing_norm_is_named(out: Path) -> None:
    only(verify(str(edit_tensors(out, lambda t: t.pop("model.norm.weight")))), "model.norm.weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_named(out: Path, value: float) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.weight_scale"][3, 1] = value
        tensors["lm_head.weight"][5, 7] = value

    lines = faults(verify(str(edit_tensors(out, spoil))))
    assert len(lines) == 2
    assert any("q_proj" in line and "NaN" in line for line in lines)
    assert any("lm_head" in line for line in lines)


def split(folder: Path) -> dict[str, Any]:
    """The weights in two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    first = {name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}
    parts = [first, {name: tensor for name, tensor in tensors.items() if name not in first}]
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    return {"metadata": {"total_size": size}, "weight_map": weight_map}


def write_index(folder: Path, index: dict[str, Any]) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return without_sums(folder)


def test_c27_a_true_index_passes_and_a_stale_size_is_remarked(out: Path) -> None:
    index = split(out)
    write_index(out, index)
    assert faults(verify(str(out))) == []
    index["metadata"]["total_size"] += 1
    (out / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    result = verify(str(out))
    assert faults(result) == []
    assert any("total_size" in remark for remark in result.findings.remarks)


LIES = [
    (lambda m: m.update({f"{Q}.weight_scale": "model-00002-of-00002.safetensors"}), "which does not hold them"),
    (lambda m: m.update(a="model-00003-of-00002.safetensors"), "which is not there: a"),
    (lambda m: m.pop("lm_head.weight"), "lacks 1 stored tensors: lm_head.weight"),
    (lambda m: m.update(a="../model.safetensors"), "no file beside it"),
    (lambda m: m.update(a="C:\\x.safetensors"), "no file beside it"),
]


@pytest.mark.parametrize(("lie", "words"), LIES, ids=[words for _, words in LIES])
def test_c27_an_index_that_lies_is_noticed(out: Path, lie: Any, words: str) -> None:
    index = split(out)
    lie(index["weight_map"])
    assert any(words in line for line in faults(verify(str(write_index(out, index)))))


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "C:x", "\\\\host\\x", "a\0b", "", ".", ".."])
def test_names_that_lead_out_of_a_folder_are_known(name: str) -> None:
    assert not is_inside(name)
    assert is_inside("kv_cache/scales.safetensors")
    assert is_inside("..x")


def test_sums_that_lie_are_noticed(out: Path) -> None:
    digest = "0" * 64
    (out / "extra.safetensors").write_bytes((out / "model.safetensors").read_bytes())
    with (out / "SHA256SUMS").open("a", encoding="utf-8") as file:
        file.write(f"{digest}  ../config.json\n{digest} *gone.txt\n")
    lines = faults(verify(str(out)))
    assert any("leads out of the folder" in line for line in lines)
    assert any("gone.txt: is not there" in line for line in lines)
    assert any("extra.safetensors: is not in SHA256SUMS" in line for line in lines)
    (out / "SHA256SUMS").write_text("nonsense\n", encoding="utf-8")
    assert any("line 1 is no digest" in line for line in faults(verify(str(out))))


def test_files_that_no_sum_speaks_of_are_remarked(out: Path) -> None:
    (out / "notes.txt").write_text("a", encoding="utf-8")
    result = verify(str(out))
    assert faults(result) == []
    assert "SHA256SUMS does not speak of notes.txt" in result.findings.remarks


def both_ropes(config: dict[str, Any]) -> None:
    theta = config["rope_parameters"]["rope_theta"]
    config |= {"rope_theta": theta, "torch_dtype": config["dtype"]}


def test_c30_a_stale_rope_key_is_a_fault_and_a_lone_one_a_remark(out: Path) -> None:
    result = verify(str(out))
    assert any("rope_parameters but not rope_theta" in remark for remark in result.findings.remarks)
    edit_json(out, "config.json", both_ropes)
    result = verify(str(out))
    assert faults(result) == []
    assert not any("rope" in remark for remark in result.findings.remarks)
    document = json.loads((out / "config.json").read_text(encoding="utf-8")) | {"rope_theta": 500000.0}
    (out / "config.json").write_text(json.dumps(document), encoding="utf-8")
    only(verify(str(out)), "config.json", "rope_theta", "500000", "contradicts")


CONFIGS = [
    (lambda c: c.update(num_hidden_layers=3), "no tensor is of layer 2"),
    (lambda c: c.update(hidden_size=32), "hidden_size"),
    (lambda c: c.update(dtype="float16"), "dtype=float16, but most float weights are bfloat16"),
    (lambda c: c.update(torch_dtype="float16"), "contradicts torch_dtype=float16"),
    (lambda c: c.update(num_nextn_predict_layers=1), "announces 1 layers"),
    (lambda c: c["quantization_config"].update(ignore=[]), "match 1 linears that are stored in float: lm_head"),
    (lambda c: c["quantization_config"].update(ignore=["lm_head", Q]), f"{Q} is stored in codes, but no target"),
]


@pytest.mark.parametrize(("change", "words"), CONFIGS, ids=["layers", "hidden", "type", "types", "c29", "c22", "c22b"])
def test_a_config_that_is_not_true_is_noticed(out: Path, change: Any, words: str) -> None:
    assert any(words in line for line in faults(verify(str(edit_json(out, "config.json", change)))))


def test_two_descriptions_that_disagree_are_noticed(out: Path) -> None:
    def narrower(document: dict[str, Any]) -> None:
        document["weights"]["schemes"]["all"] |= {"symmetric": True, "group_size": 16}

    edit_json(out, "inference_config.json", narrower)
    assert any("int4-sym-g16 there and int4-sym-g32" in line for line in faults(verify(str(out))))


def test_c25_a_description_that_lacks_a_tensor_is_noticed(tmp_path: Path, tiny: Path) -> None:
    with open_checkpoint(str(tiny)) as checkpoint:
        tensors = checkpoint.tensors
    document: dict[str, Any] = dict.fromkeys(tensors, "FLOAT") | {"model_quant_type": "W8A8", "version": "1.0.0"}
    path = tmp_path / "quant_model_description.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    sound, findings = Findings(), Findings()
    check_description(tmp_path, tensors, sound)
    assert sound.faults == []
    del document[f"{Q}.weight"]
    document |= {"model.x.weight": "W8A8", "optional": {"quarot": {"rotation_map": {"r": "../r.safetensors"}}}}
    path.write_text(json.dumps(document), encoding="utf-8")
    check_description(tmp_path, tensors, findings)
    lines = [fault.line() for fault in findings.faults]
    assert any(f"lacks 1 stored tensors: {Q}.weight" in line for line in lines)
    assert any("names 1 tensors that no file holds: model.x.weight" in line for line in lines)
    assert any("'../r.safetensors'" in line for line in lines)


@pytest.mark.parametrize("spelling", ["k_scale", "attn.k_scale"])
def test_c39_a_layer_without_its_cache_scale_is_noticed(tmp_path: Path, spelling: str) -> None:
    shutil.copytree(GOLDEN, tmp_path / "m")
    assert faults(verify(str(GOLDEN))) == []
    tensors = load_file(GOLDEN / "model.safetensors")
    tensors[f"model.layers.0.self_attn.{spelling}"] = tensors.pop("model.layers.0.self_attn.k_scale")
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    assert faults(verify(str(tmp_path / "m"))) == []
    del tensors[f"model.layers.0.self_attn.{spelling}"]
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    only(verify(str(tmp_path / "m")), "1 KV scales for 1 layers", "layer 0 has no k_scale")


def test_another_model_is_one_fault(out: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", seed=5)
    only(verify(str(out), str(other)), "--against", "do not resemble")


def test_a_router_must_stay_as_it_was(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "m", "qwen3_moe", num_hidden_layers=1)
    out = save_native(model, tmp_path / "out", INT4)
    assert faults(verify(str(out), str(model))) == []
    tensors = load_file(out / "model.safetensors")
    tensors["model.layers.0.mlp.gate.weight"][0, 0] += 1
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    only(verify(str(out), str(model)), "mlp.gate.weight", "not the source's tensor")


OTHERS = [
    (Scheme("int2", True, "group", 32), None),
    (Scheme("int3", False, "group", 32), None),
    (Scheme("int8", True, "channel", None), ActivationScheme("int8")),
    (Scheme("fp8_e4m3", True, "tile", None), None),
    (Scheme("int4", True, "tensor", None), None),
    (MXFP4, None),
]


@pytest.mark.parametrize(("scheme", "inputs"), OTHERS, ids=lambda v: v.label() if isinstance(v, Scheme) else "")
def test_every_scheme_passes(tiny: Path, tmp_path: Path, scheme: Scheme, inputs: ActivationScheme | None) -> None:
    out = save_native(tiny, tmp_path / "out", scheme, inputs)
    assert faults(verify(str(out), str(tiny))) == []


def fold(source: Path, folder: Path) -> Path:
    """The float model with every factor folded that quantization folds, by the definition, in float32."""
    shutil.copytree(source, folder)
    tensors = {name: tensor.to(torch.float32) for name, tensor in load_file(source / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(0)
    with open_checkpoint(str(source)) as checkpoint:
        arch = arch_from_checkpoint(checkpoint)
    for layer in arch.layers:
        prefix = f"model.layers.{layer.index}"
        for norm, roles in (("input_layernorm", "qkv"), ("post_attention_layernorm", ("gate", "up"))):
            factor = torch.empty(arch.hidden_size).log_normal_(0.0, 0.7, generator=generator)
            tensors[f"{prefix}.{norm}.weight"] /= factor
            for role in roles:
                tensors[f"{layer.linear(role).module}.weight"] *= factor
        v, o = (tensors[f"{layer.linear(role).module}.weight"] for role in ("v", "o"))
        factor = torch.empty(len(v)).log_normal_(0.0, 0.7, generator=generator)
        v /= factor.unsqueeze(1)
        for channel in range(o.shape[1]):
            head, place = divmod(channel, arch.head_dim)
            o[:, channel] *= factor[head // (arch.num_heads // arch.num_kv_heads) * arch.head_dim + place]
        up, down = (tensors[f"{layer.linear(role).module}.weight"] for role in ("up", "down"))
        factor = torch.empty(len(up)).log_normal_(0.0, 0.7, generator=generator)
        up /= factor.unsqueeze(1)
        down *= factor
        k, q = (tensors[f"{layer.linear(role).module}.weight"] for role in ("k", "q"))
        power = torch.exp2(torch.randint(-3, 4, (arch.num_kv_heads, 1, arch.head_dim), generator=generator).float())
        k /= power.reshape(-1, 1)
        q *= power.expand(-1, arch.num_heads // arch.num_kv_heads, -1).reshape(-1, 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("bits", ["int3", "int4", "int8"])
def test_folded_factors_are_undone_before_weights_are_compared(tiny: Path, tmp_path: Path, bits: Any) -> None:
    """Against the unfolded model, the errors are about those that the folded model itself shows."""
    folded = fold(tiny, tmp_path / "folded")
    out = save_native(folded, tmp_path / "out", Scheme(bits, True, "group", 32))
    edit_json_type(out)
    near, far = verify(str(out), str(folded)), verify(str(out), str(tiny))
    assert faults(near) == []
    assert faults(far) == []
    for mine, theirs in zip(far.errors, near.errors, strict=True):
        assert mine.error < 1.3 * theirs.error + 1e-3, mine.module


def edit_json_type(folder: Path) -> None:
    document = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(document), encoding="utf-8")


@pytest.mark.parametrize("bits", ["int2", "int3", "int4", "int8"])
def test_rounding_alone_is_taken_for_no_factor(bits: Any) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    rounded = round_weight(weight, Scheme(bits, True, "group", 32)).dequantize()
    assert row_factors(rounded, weight) is None
    factors = row_factors(rounded * torch.linspace(0.5, 2, 64).unsqueeze(1), weight)
    assert factors is not None
    assert torch.allclose(factors, torch.linspace(0.5, 2, 64), rtol=0.25)
