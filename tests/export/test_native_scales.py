"""Scales of native folders: damage is refused by folder and tensor, signs are kept where a peer chose them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from native_folders import save_native
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny
from torch import Tensor

from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.export.packed import open_packed
from cann_llm_quant.quant.rtn import solve
from cann_llm_quant.quant.scheme import MXFP4, MXFP8, NVFP4, Scheme

M = "model.layers.0.mlp.up_proj"
SCHEMES = {
    "int4": Scheme("int4", True, "group", 32),
    "int8": Scheme("int8", False, "channel", None),
    "fp8": Scheme("fp8_e4m3", True, "tile", None),
    "nvfp4": NVFP4,
}
Edit = Callable[[Tensor], Tensor]


def with_number(value: float) -> Edit:
    def edit(scale: Tensor) -> Tensor:
        changed = scale.clone()
        changed.view(-1)[-1] = torch.tensor(value).to(scale.dtype)
        return changed

    return edit


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("native")
    source = save_tiny(root / "source", num_hidden_layers=1)
    for name, scheme in SCHEMES.items():
        save_native(source, root / name, scheme)
    return root


def edited(folder: Path, out: Path, edit: Edit, suffix: str = "weight_scale") -> Path:
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    tensors[f"{M}.{suffix}"] = edit(tensors[f"{M}.{suffix}"])
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (with_number(-0.01), "is negative"),
        (with_number(float("nan")), "holds NaN or infinity"),
        (with_number(-float("inf")), "holds NaN or infinity"),
        (lambda scale: scale.to(torch.float64), "is torch.float64, expected"),
        (lambda scale: scale.to(torch.float32).to(torch.float8_e5m2), "is torch.float8_e5m2, expected"),
    ],
    ids=["negative", "nan", "infinite", "float64", "float8"],
)
def test_damaged_scales_are_refused_by_folder_and_tensor(
    folders: Path, tmp_path: Path, name: str, edit: Edit, said: str
) -> None:
    folder = edited(folders / name, tmp_path / "m", edit)
    if (name, said) == ("nvfp4", "holds NaN or infinity"):
        said = "weight_scale"  # e4m3 has no infinity, so that it becomes the largest number
    with open_packed(folder) as checkpoint, pytest.raises(CheckpointError) as refusal:
        checkpoint.quantized(M)
    assert str(refusal.value).startswith(f"{folder}: {M}")
    assert "weight_scale" in str(refusal.value)
    assert said in str(refusal.value)


def test_a_negative_divisor_makes_every_scale_negative(folders: Path, tmp_path: Path) -> None:
    folder = edited(folders / "nvfp4", tmp_path / "m", torch.neg, "weight_global_scale")
    with open_packed(folder) as checkpoint, pytest.raises(CheckpointError, match="is negative"):
        checkpoint.quantized(M)


def test_a_converted_model_keeps_the_signs_that_its_source_chose(folders: Path, tmp_path: Path) -> None:
    """A Q4_0 block of llama.cpp has the sign of its largest weight, and AutoRound's symmetric groups may as well."""
    folder = edited(folders / "int4", tmp_path / "m", torch.neg)
    path = folder / "inference_config.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["provenance"]["recipe"] = {"converted_from": "gguf"}
    path.write_text(json.dumps(document), encoding="utf-8")
    with open_packed(folders / "int4") as before, open_packed(folder) as after:
        assert torch.equal(after.load(f"{M}.weight"), -before.load(f"{M}.weight"))


@pytest.mark.parametrize("scheme", [*SCHEMES.values(), MXFP4, MXFP8, Scheme("int2", True, "group", 32)], ids=str)
@pytest.mark.parametrize("weight", [0.0, -1.0, 1e-38, 3e38, -3e38])
def test_rounding_chooses_positive_scales_for_any_weights(scheme: Scheme, weight: float) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        found = solve(torch.full((128, 128), weight), scheme, dtype)
        assert bool((found.scale > 0).all())
