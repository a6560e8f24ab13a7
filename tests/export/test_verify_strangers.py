"""Outputs as a stranger might hand them over: codes in wider types, factors that nothing undoes, configs that say other
things than the tensors or the source, and what is no model at all.
"""

import json
import os
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

from cann_llm_quant.cli.main import main
from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.export.layouts import ExportOptions, export_model
from cann_llm_quant.export.verify import Verification, verify
from cann_llm_quant.export.verify_groups import used_bits
from cann_llm_quant.quant.rtn import solve
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme, scheme_for

UP, DOWN = (f"model.layers.0.mlp.{part}_proj" for part in ("up", "down"))
V = "model.layers.0.self_attn.v_proj"
INT4 = Scheme("int4", True, "group", 32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """q, k and v read 128 columns, so that factors of rows are known well."""
    folder = tmp_path_factory.mktemp("strangers") / "m"
    return save_tiny(folder, "qwen2", num_hidden_layers=1, hidden_size=128, intermediate_size=192)


@pytest.fixture(scope="module")
def sound(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_native(tiny, tmp_path_factory.mktemp("strangers") / "out", INT4)


@pytest.fixture
def out(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "out")
    return tmp_path / "out"


def faults(result: Verification) -> list[str]:
    return [fault.line() for fault in result.findings.faults]


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "SHA256SUMS").unlink(missing_ok=True)
    return folder


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")
    (path.parent / "SHA256SUMS").unlink(missing_ok=True)


def scaled(module: str, rows: slice, factor: float) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors[f"{module}.weight_scale"][rows].mul_(factor)


@pytest.mark.parametrize("bits", [2, 3])
def test_few_bits_in_a_wider_type_are_judged_as_few(tiny: Path, tmp_path: Path, bits: int) -> None:
    """GGUF has no type of 2 or 3 bits, so that codes lie in Q4_0; the noise is theirs all the same."""
    native = save_native(tiny, tmp_path / "native", scheme_for(bits, 32, symmetric=True))
    edit_tensors(native, shrink_some_groups)
    assert faults(verify(str(native), str(tiny))) == []
    out = export_model(native, tmp_path / "gguf", "gguf", ExportOptions(tokenizer=False)).path
    result = verify(str(out), str(tiny))
    assert set(result.schemes) == {INT4.label()}
    assert faults(result) == []


def shrink_some_groups(tensors: dict[str, Tensor]) -> None:
    """Some groups at 0.42 of the source: what feeding errors back leaves at 2 bits, and at 3 in rare cases."""
    tensors[f"{DOWN}.weight_scale"][::7, 1] *= 0.42


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_bits_that_codes_use_are_known_whatever_holds_them(bits: int) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    own = solve(
        weight, Scheme({2: "int2", 3: "int3", 4: "int4", 8: "int8"}[bits], True, "channel", None), torch.float32
    )
    held = QuantizedTensor(own.codes, own.scale, None, Scheme("int8", True, "channel", None))
    assert used_bits(own) == used_bits(held) == bits
    damaged = own.codes.clone()
    damaged[3, 5] = -128
    assert used_bits(QuantizedTensor(damaged, own.scale, None, held.scheme)) == bits


@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_that_one_scale_a_tensor_rounds_to_nothing_are_no_damage(
    tiny: Path, tmp_path: Path, symmetric: bool
) -> None:
    """Beside one outlier of the matrix, a row of a tenth of the others' size is 0 as a whole."""
    source = Path(shutil.copytree(tiny, tmp_path / "m"))
    edit_tensors(source, one_outlier)
    out = save_native(source, tmp_path / "out", Scheme("int8", symmetric, "tensor", None))
    assert faults(verify(str(out), str(source))) == []
    edit_tensors(out, scaled(DOWN, slice(5, 6), 8.0))
    assert any(line.startswith(f"{DOWN}: 1 of 128 groups") for line in faults(verify(str(out), str(source))))


def one_outlier(tensors: dict[str, Tensor]) -> None:
    weight = tensors[f"{DOWN}.weight"]
    weight[3, 5] = 5.0
    weight[10] *= 0.08


@pytest.mark.parametrize(
    ("module", "rows", "factor", "words"),
    [
        (UP, slice(7, 8), 2.0, f"{UP}: rows are"),
        (V, slice(3, 4), 0.5, f"{V}: rows are"),
        (UP, slice(None), 1.3, "is as a whole"),
        (DOWN, slice(None), 1.3, f"{DOWN}: is as a whole 1.3 times the source's"),
    ],
    ids=["row-of-up", "row-of-v", "up", "down"],
)
def test_scales_that_nothing_undoes_are_noticed(
    out: Path, tiny: Path, module: str, rows: slice, factor: float, words: str
) -> None:
    assert faults(verify(str(out), str(tiny))) == []
    lines = faults(verify(str(edit_tensors(out, scaled(module, rows, factor))), str(tiny)))
    assert any(words in line for line in lines), lines


@pytest.mark.parametrize("part", ["q", "k"])
@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_row_of_q_or_k_may_change_only_with_its_partner(
    tmp_path: Path, family: str, factor: float, part: str
) -> None:
    """Powers of two may go from k to q, where no norm takes them; a single row is damage, as is one of q alone."""
    source = save_tiny(tmp_path / "m", family, num_hidden_layers=1, hidden_size=128, head_dim=32)
    out = save_native(source, tmp_path / "out", Scheme("int8", True, "channel", None))
    module = f"model.layers.0.self_attn.{part}_proj"
    edit_tensors(out, scaled(module, slice(3, 4), factor))
    lines = faults(verify(str(out), str(source)))
    assert any(line.startswith("model.layers.0.self_attn.") for line in lines), lines


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_single_number_of_a_large_matrix_is_noticed(out: Path, tiny: Path, name: str) -> None:
    """Its error as a share of the whole matrix is less than rounding's."""
    edit_tensors(out, lambda tensors: tensors[name].view(-1)[300].mul_(1.5))
    (line,) = faults(verify(str(out), str(tiny)))
    assert line.startswith(f"{name.removesuffix('.weight')}: is stored in float, but 1 of its numbers is not")


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_a_head_that_a_layout_could_hold_in_float_alone_is_no_damage(
    out: Path, tiny: Path, tmp_path: Path, bits: int
) -> None:
    """AWQ has no codes for heads; float weights that were never rounded are held to the source's all the same."""

    def rounded(tensors: dict[str, Tensor]) -> None:
        head = tensors["lm_head.weight"]
        tensors["lm_head.weight"] = round_weight(head, scheme_for(bits, 32, symmetric=True)).dequantize(head.dtype)

    result = verify(str(edit_tensors(out, rounded)), str(tiny))
    assert faults(result) == []
    assert any("lm_head was dequantized from codes" in remark for remark in result.findings.remarks)
    noise = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16) * 0.01
    edit_tensors(out, lambda tensors: tensors["lm_head.weight"].add_(noise))
    assert any("lm_head: is stored in float, but" in line for line in faults(verify(str(out), str(tiny))))


def test_a_source_in_float32_is_compared_as_well(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "m", num_hidden_layers=1, dtype=torch.float32)
    assert faults(verify(str(save_native(source, tmp_path / "out", INT4)), str(source))) == []


def in_section(**change: Any) -> Callable[[Path], None]:
    return lambda out: edit_json(out / "config.json", lambda d: d["quantization_config"].update(change))


def without_section(out: Path) -> None:
    edit_json(out / "config.json", lambda d: d.pop("quantization_config"))


def other_form(out: Path) -> None:
    edit_json(
        out / "config.json",
        lambda d: d["quantization_config"]["config_groups"]["group_0"].update(format="int-quantized"),
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (in_section(quant_method="gptq"), "quant_method is 'gptq', but tensors are those of compressed-tensors"),
        (without_section, "has no quantization_config, but 7 linears are stored in codes"),
        (other_form, "group_0 has format int-quantized, but tensors are pack-quantized"),
    ],
    ids=["method", "no-section", "form"],
)
def test_a_section_that_runtimes_cannot_follow_is_noticed(out: Path, change: Any, words: str) -> None:
    assert faults(verify(str(out))) == []
    change(out)
    assert any(words in line for line in faults(verify(str(out))))


def test_a_side_file_that_contradicts_the_section_is_noticed(sound: Path, tmp_path: Path) -> None:
    out = export_model(sound, tmp_path / "out", "gptq", ExportOptions()).path
    assert faults(verify(str(out))) == []
    edit_json(out / "quantize_config.json", lambda d: d.update(bits=8, group_size=64, desc_act=None))
    lines = faults(verify(str(out)))
    assert [line.partition(": ")[2] for line in lines] == [
        "says bits=8, config.json 4; one of the files is stale; runtimes differ in which they read",
        "says group_size=64, config.json 32; one of the files is stale; runtimes differ in which they read",
    ]


def test_zero_points_that_awq_denies_are_noticed(tiny: Path, tmp_path: Path) -> None:
    native = save_native(tiny, tmp_path / "native", Scheme("int4", False, "group", 32))
    out = export_model(native, tmp_path / "out", "awq", ExportOptions()).path
    in_section(zero_point=False)(out)
    assert any(
        "zero_point is false, but zero points other than the middle" in line for line in faults(verify(str(out)))
    )


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("eos_token_id", 5, "eos_token_id is 5, the source's 2"),
        ("bos_token_id", [1, 3], "bos_token_id is [1, 3], the source's 1"),
        ("architectures", ["BertModel"], "architectures is ['BertModel'], the source's ['Qwen2ForCausalLM']"),
    ],
)
def test_what_only_the_config_says_is_compared(out: Path, tiny: Path, field: str, value: Any, words: str) -> None:
    edit_json(out / "config.json", lambda d: d.update({field: value}))
    assert faults(verify(str(out))) == []
    (line,) = faults(verify(str(out), str(tiny)))
    assert words in line


def test_a_chat_template_is_the_sources(out: Path, tiny: Path, tmp_path: Path) -> None:
    source = shutil.copytree(tiny, tmp_path / "m")
    (source / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    assert "lacks the source's chat_template.jinja" in faults(verify(str(out), str(source)))[0]


def test_many_ids_that_are_none_are_one_fault(out: Path) -> None:
    edit_json(out / "config.json", lambda d: d.update(eos_token_id=list(range(20_000))))
    (line,) = faults(verify(str(out)))
    assert "eos_token_id is 128, 129, 130, 131, 132 and 19867 more, but the model has 128 tokens" in line


def test_tensors_without_a_place_and_pickles_are_remarked(out: Path) -> None:
    edit_tensors(out, lambda t: t.update({f"{UP}.lora": torch.ones(3)}))
    (out / "pytorch_model.bin").write_bytes(b"PK")
    result = verify(str(out))
    assert result.passed
    assert f"1 tensors have no place in the architecture: {UP}.lora" in result.findings.remarks
    assert any("pytorch_model.bin" in remark for remark in result.findings.remarks)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [pipe, device, Path.mkdir])
@pytest.mark.parametrize("name", ["x.safetensors", "generation_config.json"])
def test_what_only_looks_like_a_file_is_a_fault(out: Path, make: Callable[[Path], Any], name: str) -> None:
    (out / name).unlink(missing_ok=True)
    make(out / name)
    (line,) = faults(verify(str(out)))
    assert name in line
    assert ("is a folder" if make is Path.mkdir else "is no file") in line


def test_a_number_of_a_layer_that_no_integer_holds_is_no_layer(out: Path) -> None:
    edit_tensors(out, lambda t: t.update({f"model.layers.{'9' * 5000}.x": torch.ones(1)}))
    assert verify(str(out)).passed


def test_a_gguf_file_with_more_layers_than_it_says_is_noticed(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "m", num_hidden_layers=2)
    native = save_native(source, tmp_path / "native", INT4)
    (file,) = export_model(native, tmp_path / "out", "gguf", ExportOptions(tokenizer=False)).path.glob("*.gguf")
    key = b"llama.block_count"
    data = file.read_bytes()
    place = data.index(key) + len(key) + 4
    assert data[place : place + 4] == b"\x02\0\0\0"
    file.write_bytes(data[:place] + b"\x01" + data[place + 1 :])
    assert any("says 1 layers, but files hold model.layers.1." in line for line in faults(verify(str(file))))


def test_a_large_file_of_other_data_is_not_read(out: Path) -> None:
    with (out / "records.json").open("wb") as file:
        file.truncate(200 << 20)
    result = verify(str(out))
    assert result.passed
    assert "records.json is larger than 128 MiB and was not looked into" in result.findings.remarks


def test_a_name_that_breaks_lines_stays_on_its_own(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (out / "a\nb.json").write_text("{", encoding="utf-8")
    assert main(["verify", str(out)]) == 1
    assert sum(line.startswith("wrong: ") and "b.json" in line for line in capsys.readouterr().out.splitlines()) == 1


def test_an_inference_config_that_is_too_deep_is_a_fault(out: Path) -> None:
    (out / "inference_config.json").write_bytes(b"[" * 100_000)
    assert any("inference_config.json: is not valid JSON" in line for line in faults(verify(str(out))))


@pytest.mark.parametrize("name", ["notes.txt", "empty", "pipe", "model.safetensors"])
def test_what_is_no_model_ends_in_2(sound: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    if name == "empty":
        path.mkdir()
    elif name == "pipe":
        os.mkfifo(path)
    else:
        shutil.copy(sound / "model.safetensors", path)
    with pytest.raises(CheckpointError):
        verify(str(path))
    assert main(["verify", str(path), "--json"]) == 2
    output = capsys.readouterr()
    assert json.loads(output.out)["exit_code"] == 2
    assert len(output.err.splitlines()) == 1
