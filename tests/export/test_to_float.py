"""The export to float on a real quantized folder: what it may replace, what it casts, what it leaves beside."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_text, save_tiny

from cann_llm_quant.errors import ResumeError, UnsupportedError, UsageError
from cann_llm_quant.export.to_float import FILE_NAME, export_to_float
from cann_llm_quant.pipeline import RunOptions, quantize_model
from cann_llm_quant.recipe import Calibration, Recipe


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized model that also carries an integer and a flag tensor which the decoder does not read."""
    folder = tmp_path_factory.mktemp("packed")
    model = save_tiny(folder / "model", num_hidden_layers=1)
    tensors = load_file(model / "model.safetensors")
    tensors["model.extra.position_ids"] = torch.arange(2**24 + 1, 2**24 + 5)
    tensors["model.extra.mask"] = torch.tensor([True, False])
    tensors["model.extra.scale"] = torch.tensor([1.5], dtype=torch.float64)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    text = save_text(folder / "text.txt")
    recipe = Recipe(method="rtn", calibration=Calibration(data=(str(text),), samples=2, length=16))
    quantize_model(str(model), folder / "q", recipe, options=RunOptions())
    return folder / "q"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, None])
def test_only_floating_tensors_are_cast(packed: Path, tmp_path: Path, dtype: torch.dtype | None) -> None:
    export_to_float(packed, tmp_path / "plain", dtype=dtype)
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    source = load_file(packed / "model.safetensors")
    for name in ("model.extra.position_ids", "model.extra.mask"):
        assert tensors[name].dtype == source[name].dtype
        assert torch.equal(tensors[name], source[name])
    assert tensors["model.extra.scale"].dtype == (dtype or torch.float64)
    floats = {t.dtype for name, t in tensors.items() if t.is_floating_point() and name != "model.extra.scale"}
    assert floats == {dtype or torch.bfloat16}
    config = json.loads((tmp_path / "plain" / "config.json").read_text(encoding="utf-8"))
    assert config["torch_dtype"] == str(dtype or torch.bfloat16).removeprefix("torch.")


def test_float16_makes_no_infinities(packed: Path, tmp_path: Path) -> None:
    """Of codes and of plain numbers; what is infinite in the source, as masks of older models are, stays so."""
    source = shutil.copytree(packed, tmp_path / "q")
    tensors = load_file(source / "model.safetensors")
    tensors["model.extra.scale"] = torch.tensor([-torch.inf], dtype=torch.float64)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    export_to_float(source, tmp_path / "plain", dtype=torch.float16)
    assert load_file(tmp_path / "plain" / "model.safetensors")["model.extra.scale"].tolist() == [-torch.inf]
    scale = next(name for name in tensors if name.endswith("v_proj.weight_scale"))
    for name, large in ((scale, 3e4), ("model.norm.weight", 1e5)):
        changed = tensors | {name: torch.full_like(tensors[name], large)}
        save_file(changed, source / "model.safetensors", metadata={"format": "pt"})
        named = name.replace("weight_scale", "weight")
        with pytest.raises(UnsupportedError, match=rf"{named} holds numbers beyond float16; .* bf16 or fp32"):
            export_to_float(source, tmp_path / "large", dtype=torch.float16)
        assert {path.name for path in tmp_path.iterdir()} == {"q", "plain"}
    export_to_float(source, tmp_path / "large", dtype=torch.bfloat16)


def test_the_packed_model_is_never_replaced_by_its_own_export(packed: Path, tmp_path: Path) -> None:
    source = shutil.copytree(packed, tmp_path / "q")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    for out in (source, source / "plain", tmp_path):
        with pytest.raises(UsageError, match="source"):
            export_to_float(source, out, overwrite=True)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["q"]


def test_overwrite_replaces_an_export_and_nothing_else(packed: Path, tmp_path: Path) -> None:
    export_to_float(packed, tmp_path / "plain")
    origin = json.loads((tmp_path / "plain" / FILE_NAME).read_text(encoding="utf-8"))
    assert origin["tool"] == "cann-llm-quant"
    assert origin["quantized_source_name"] == "model"
    export_to_float(packed, tmp_path / "plain", dtype=torch.float32, overwrite=True)
    (tmp_path / "plain" / FILE_NAME).unlink()
    with pytest.raises(UsageError, match="no output of this tool"):
        export_to_float(packed, tmp_path / "plain", overwrite=True)


def test_the_place_is_checked_before_the_source_is_opened(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="leads nowhere"):
        export_to_float(tmp_path / "no such model", tmp_path / "dangling")


def test_another_shard_size_is_named_once(packed: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_to_float(packed, tmp_path / "plain", progress=stop)
    with pytest.raises(ResumeError) as caught:
        export_to_float(packed, tmp_path / "plain", max_shard_bytes=10**6)
    assert str(caught.value).count("max_shard_bytes") == 1
