"""A model streamed into another layout: the same codes, resumable, refused with what would help."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from native_folders import save_native
from safetensors.torch import load_file, save_file
from tiny_models import our_logits, save_tiny

from cann_llm_quant.errors import CheckpointError, InputError, ResumeError, UnsupportedError
from cann_llm_quant.export.convert import convert
from cann_llm_quant.export.layouts import ExportOptions, export_model
from cann_llm_quant.export.native_encoder import NativeEncoder
from cann_llm_quant.export.native_reader import open_native
from cann_llm_quant.export.weight_only import dense
from cann_llm_quant.quant.regroup import finer, regroup
from cann_llm_quant.quant.scheme import ActivationScheme, QuantizedTensor, Scheme

INT4 = Scheme("int4", True, "group", 32)
IDS = torch.randint(3, 128, (1, 24), generator=torch.Generator().manual_seed(3))


class Narrow(NativeEncoder):
    """A layout for groups of 16 only."""

    layout = "narrow"

    def refusal(self, module, scheme, activations, shape):
        return None if scheme.group_size == 16 else "has no groups of 16"

    def nearest(self, scheme, shape):
        return Scheme("int4", scheme.symmetric, "group", 16)


def by(encoder):
    return lambda model, checkpoint: encoder(checkpoint)


def same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    zeros = (a.zero_point is None) == (b.zero_point is None)
    zeros = zeros and (a.zero_point is None or torch.equal(a.zero_point, b.zero_point))
    return torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale) and zeros and a.scheme == b.scheme


@pytest.mark.parametrize(
    ("scheme", "inputs"),
    [
        (INT4, None),
        (Scheme("int4", False, "group", 32), None),
        (Scheme("int3", False, "group", 32), None),
        (Scheme("int8", True, "channel", None), ActivationScheme()),
        (Scheme("fp8_e4m3", True, "tile", None), None),
    ],
    ids=lambda value: value.label() if isinstance(value, Scheme) else "",
)
def test_native_to_native_keeps_every_code(tmp_path: Path, scheme: Scheme, inputs: ActivationScheme | None) -> None:
    source = save_native(save_tiny(tmp_path / "m", "qwen2"), tmp_path / "q", scheme, inputs)
    done = convert(source, tmp_path / "out", by(NativeEncoder))
    with open_native(source) as old, open_native(tmp_path / "out") as new:
        assert old.modules == new.modules
        assert done.linears == len(old.modules)
        assert set(old.tensors) == set(new.tensors)
        for module in old.modules:
            assert same(old.quantized(module), new.quantized(module))
        for name in set(old.tensors) - {f"{module}.weight" for module in old.modules}:
            assert torch.equal(old.load(name), new.load(name))
    assert torch.equal(our_logits(source, IDS), our_logits(tmp_path / "out", IDS))
    origin = json.loads((tmp_path / "out" / "export.json").read_text())
    assert (origin["layout"], origin["source_layout"]) == ("compressed-tensors", "native")
    old_config, new_config = (json.loads((f / "config.json").read_text()) for f in (source, tmp_path / "out"))
    kept = {key: old_config[key] for key in old_config if key not in ("quantization_config", "transformers_version")}
    assert {key: new_config[key] for key in kept} == kept
    assert sorted(new_config["quantization_config"]["config_groups"]) == ["group_0"]


def test_a_refusal_names_linears_and_what_would_help(tmp_path: Path) -> None:
    source = save_native(save_tiny(tmp_path / "m"), tmp_path / "q", INT4)
    with pytest.raises(UnsupportedError) as caught:
        convert(source, tmp_path / "out", by(Narrow))
    assert str(caught.value) == (
        "the source cannot be written as narrow: model.layers.0.mlp.down_proj (int4-sym-g32, like 13 others) "
        "has no groups of 16; --regroup 16 splits the groups without a loss or --requantize rounds them anew, to "
        "int4-sym-g16"
    )
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_split_groups_mean_the_same(tmp_path: Path) -> None:
    source = save_native(save_tiny(tmp_path / "m"), tmp_path / "q", Scheme("int4", False, "group", 32))
    convert(source, tmp_path / "out", by(Narrow), regroup=16)
    assert torch.equal(our_logits(source, IDS), our_logits(tmp_path / "out", IDS))
    with open_native(tmp_path / "out") as new:
        assert {linear.scheme.group_size for linear in new.reader.linears.values()} == {16}


def test_rounding_anew_is_said(tmp_path: Path) -> None:
    source = save_native(save_tiny(tmp_path / "m"), tmp_path / "q", Scheme("int8", True, "channel", None))
    done = convert(source, tmp_path / "out", by(Narrow), requantize=True)
    assert done.rounded == done.linears == 14
    with open_native(source) as old, open_native(tmp_path / "out") as new:
        for module in old.modules:
            before, after = old.quantized(module).dequantize(), new.quantized(module).dequantize()
            step = float(new.quantized(module).scale.max())
            assert 0 < float((after - before).abs().max()) <= 0.55 * step


@pytest.mark.parametrize("own", [Scheme("int4", False, "group", 32), Scheme("int4", False, "channel", None)])
def test_regroup_repeats_scales(own: Scheme) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (6, 64), generator=generator, dtype=torch.int8)
    groups = own.scale_shape(6, 64)[1]
    scale = torch.rand(6, groups, generator=generator)
    zero = torch.randint(-8, 8, (6, groups), generator=generator, dtype=torch.int8)
    weight = QuantizedTensor(codes, scale, zero, own)
    split = regroup(weight, 16)
    assert split.scale.shape == (6, 4)
    assert torch.equal(split.dequantize(), weight.dequantize())
    assert finer(own, 64, 24) is None
    assert finer(replace(own, strategy="tensor", group_size=None), 64, 16) == split.scheme
    assert finer(Scheme("fp8_e4m3", True, "tile", None), 128, 32) is None


def test_an_export_with_other_options_does_not_go_on_with_what_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_native(save_tiny(tmp_path / "m"), tmp_path / "q", INT4)
    with monkeypatch.context() as patch:
        patch.setattr("cann_llm_quant.export.ascend.AscendEncoder.files", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export_model(source, tmp_path / "out", "ascend", ExportOptions(kv_cache=False))
    with pytest.raises(ResumeError, match="kv_cache"):
        export_model(source, tmp_path / "out", "ascend", ExportOptions())
    export_model(source, tmp_path / "out", "ascend", ExportOptions(kv_cache=False))


def test_what_only_the_weights_show_leaves_nothing_behind(tmp_path: Path) -> None:
    """A row of weights above 0 has the smallest zero point, which GPTQ version 1 cannot store; version 2 then can."""
    model = save_tiny(tmp_path / "m", num_hidden_layers=2)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"].abs_()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    source = save_native(model, tmp_path / "q", Scheme("int4", False, "group", 32))
    out = tmp_path / "out"
    with pytest.raises(UnsupportedError, match=r"layers\.1\.mlp\.down_proj.*export to gptq_v2"):
        export_model(source, out, "gptq", ExportOptions())
    assert {path.name for path in tmp_path.iterdir()} == {"m", "q"}
    assert export_model(source, out, "gptq_v2", ExportOptions()).path == out


@pytest.mark.parametrize("layout", ["awq", "gptq", "gguf"])
def test_scales_beyond_a_layout_leave_nothing_behind_but_what_was_there(tmp_path: Path, layout: str) -> None:
    """float16 ends at 65504; the same place then takes a layout that keeps scales in bfloat16."""
    source = save_native(save_tiny(tmp_path / "m", num_hidden_layers=2), tmp_path / "q", INT4)
    stored = load_file(source / "model.safetensors")
    stored["model.layers.1.mlp.up_proj.weight_scale"][3, 1] = 1e5
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    out, options = tmp_path / "out", ExportOptions(tokenizer=layout != "gguf")
    refused = pytest.raises(InputError, match=r"layers\.1\.mlp\.up_proj.*float16")
    with refused:
        export_model(source, out, layout, options)
    assert {path.name for path in tmp_path.iterdir()} == {"m", "q"}
    export_model(source, out, "mlx", ExportOptions())
    before = {path: path.read_bytes() for path in out.iterdir()}
    with refused:
        export_model(source, out, layout, replace(options, overwrite=True))
    assert {path.name for path in tmp_path.iterdir()} == {"m", "q", "out"}
    assert {path: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("layout", ["awq", "gptq", "mlx"])
def test_of_a_model_in_float_layouts_of_codes_say_what_to_do(tmp_path: Path, layout: str) -> None:
    model = save_tiny(tmp_path / "m", num_hidden_layers=1)
    with pytest.raises(UnsupportedError, match=r"no linear is in codes.*; quantize the model first"):
        export_model(model, tmp_path / "out", layout, ExportOptions())
    with pytest.raises(UnsupportedError, match="is not quantized"):
        export_model(model, tmp_path / "out", "float", ExportOptions())


def test_pickled_weights_are_read_where_that_is_allowed(tmp_path: Path) -> None:
    """The same file as from safetensors; of a source whose files cannot run code nothing is asked."""
    model = save_tiny(tmp_path / "m", num_hidden_layers=1)
    pickled = shutil.copytree(model, tmp_path / "p")
    (pickled / "model.safetensors").unlink()
    torch.save(load_file(model / "model.safetensors"), pickled / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pass --allow-pickle"):
        export_model(pickled, tmp_path / "out", "gguf", ExportOptions(tokenizer=False))
    for source in (model, pickled):
        options = ExportOptions(tokenizer=False, allow_pickle=source == pickled)
        export_model(source, tmp_path / f"{source.name}-gguf", "gguf", options)
    first, second = (next((tmp_path / name).glob("*.gguf")) for name in ("m-gguf", "p-gguf"))
    assert first.stat().st_size == second.stat().st_size
    assert first.read_bytes()[4096:] == second.read_bytes()[4096:], "all but the model's name"


def test_an_embedding_beyond_the_type_of_its_scales_is_no_infinity(tmp_path: Path) -> None:
    codes = torch.full((8, 32), 7, dtype=torch.int8)
    weight = QuantizedTensor(codes, torch.full((8, 1), 60000.0, dtype=torch.float16), None, INT4)
    with pytest.raises(UnsupportedError, match="embed holds numbers beyond float16"):
        dense("embed", weight, None)
