"""What --regroup and --requantize do where a layout holds only a part of a model, and where groups are scattered."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from encoded_folders import save_encoded
from native_folders import save_native
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny

from cann_llm_quant.errors import UnsupportedError, UsageError
from cann_llm_quant.export.fitting import fit, fitted
from cann_llm_quant.export.gptq import GptqEncoder
from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.export.layouts import ExportOptions, export_model
from cann_llm_quant.export.packed import open_packed
from cann_llm_quant.export.packed_model import packed_model
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme

WIDE, NARROW = Scheme("int4", True, "group", 32), Scheme("int4", True, "group", 16)
ROWS = Scheme("int8", True, "channel", None)


class Grouped:
    """int4 in groups of up to 32, or int8 a row; rounds what it refuses to int4 in groups of 32."""

    layout = "grouped"

    def refusal(self, module, scheme, activations, shape):
        return None if scheme == ROWS or scheme in (WIDE, NARROW) else "is neither"

    def nearest(self, scheme, shape):
        return WIDE


@pytest.fixture(scope="module")
def scattered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPTQ folder with act-order: the columns of every linear have random groups."""
    folder = tmp_path_factory.mktemp("scattered")
    out = folder / "gptq"
    save_encoded(save_tiny(folder / "m"), out, GptqEncoder(1, act_order=True), lambda m: None if "head" in m else WIDE)
    tensors = load_file(out / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in sorted(tensors):
        if name.endswith("g_idx"):
            tensors[name] = tensors[name][torch.randperm(len(tensors[name]), generator=generator)]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "quantize_config.json"):
        text = (out / name).read_text(encoding="utf-8")
        (out / name).write_text(text.replace('"desc_act": false', '"desc_act": true'), encoding="utf-8")
    return out


def mixed(folder: Path) -> PackedModel:
    """A model whose linears are int4 in groups but for down, which is int8 a row."""
    with open_packed(save_native(save_tiny(folder / "m"), folder / "q", WIDE)) as checkpoint:
        model = packed_model(checkpoint)
    return replace(model, schemes={one: ROWS if "down" in one else WIDE for one in model.schemes})


def test_a_scale_a_row_stays_where_only_grouped_linears_can_be_split(tmp_path: Path) -> None:
    model = mixed(tmp_path)
    chosen = fit(model, Grouped(), size=16)
    assert chosen.schemes == {one: ROWS if "down" in one else NARROW for one in model.schemes}
    assert not chosen.rounded


def test_linears_rounded_anew_get_the_groups_that_were_asked_for(tmp_path: Path) -> None:
    model = mixed(tmp_path)
    odd = replace(model, schemes=dict.fromkeys(model.schemes, Scheme("int8", False, "channel", None)))
    chosen = fit(odd, Grouped(), size=16, requantize=True)
    assert set(chosen.schemes.values()) == {NARROW}
    assert chosen.rounded == set(model.schemes)


def test_groups_that_the_size_does_not_divide_are_refused_instead_of_kept(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--regroup 24 does not divide the groups of 32 that model\.layers\.0.*has"):
        fit(mixed(tmp_path), Grouped(), size=24)


def test_all_schemes_that_rounding_leads_to_are_named(tmp_path: Path) -> None:
    class Widths(Grouped):
        def refusal(self, module, scheme, activations, shape):
            return None if scheme in (NARROW, Scheme("int8", True, "group", 16)) else "is neither"

        def nearest(self, scheme, shape):
            return NARROW if scheme == WIDE else Scheme("int8", True, "group", 16)

    with pytest.raises(UnsupportedError, match=r"to int8-sym-g16 and int4-sym-g16$"):
        fit(mixed(tmp_path), Widths())


@pytest.mark.parametrize("layout", ["gptq", "awq", "compressed-tensors", "onnx"])
def test_c20_scattered_groups_are_never_offered_to_be_split(scattered: Path, tmp_path: Path, layout: str) -> None:
    with pytest.raises(UnsupportedError, match=r"groups of scattered columns \(act-order\)") as caught:
        export_model(scattered, tmp_path / "out", layout, ExportOptions(regroup=16))
    assert "splits the groups" not in str(caught.value)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("layout", ["awq", "mlx", "gguf"])
def test_c20_scattered_groups_are_rounded_anew_into_the_same_scheme(
    scattered: Path, tmp_path: Path, layout: str
) -> None:
    options = ExportOptions(tokenizer=layout != "gguf")
    with pytest.raises(UnsupportedError, match="only GPTQ's g_idx can say; --requantize rounds them anew, to int4"):
        export_model(scattered, tmp_path / "out", layout, options)
    done = export_model(scattered, tmp_path / "out", layout, replace(options, requantize=True))
    assert done.rounded == done.linears == 14
    written = next((tmp_path / "out").glob("*.gguf"), tmp_path / "out")
    with open_packed(scattered) as old, open_packed(written) as new:
        for module in old.modules:
            before, after = dense(old.quantized(module)), dense(new.quantized(module))
            # scales of the new groups are at most as wide as all columns' together
            assert 0 < float((after - before).abs().max()) <= 0.51 * float(before.abs().max()) / 7


def test_what_was_rounded_anew_is_not_scattered_any_more(scattered: Path) -> None:
    with open_packed(scattered) as checkpoint:
        model = packed_model(checkpoint)
    assert fitted(model, fit(model, Grouped(), requantize=True)).scattered == frozenset()


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
@pytest.mark.parametrize(("regroup", "act_order"), [(None, True), (16, False)])
def test_c20_act_order_is_said_only_of_columns_that_are_still_scattered(
    scattered: Path, tmp_path: Path, layout: str, regroup: int | None, act_order: bool
) -> None:
    out = tmp_path / "out"
    done = export_model(scattered, out, layout, ExportOptions(regroup=regroup, requantize=True))
    assert done.rounded == (0 if act_order else 14)
    for name in ("config.json", "quantize_config.json"):
        section = json.loads((out / name).read_text(encoding="utf-8"))
        assert section.get("quantization_config", section)["desc_act"] is act_order
    tensors = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    columns = [tensor for name, tensor in tensors.items() if name.endswith("g_idx")]
    assert len(columns) == 14
    assert any(bool((index.diff() < 0).any()) for index in columns) is act_order


def dense(weight: QuantizedTensor) -> torch.Tensor:
    return weight.dequantize().to(torch.float64)
