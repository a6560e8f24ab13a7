"""What is reported of a linear beside plain rounding's figure, and that no method ends above it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_text, save_tiny
from torch import Tensor

from cann_llm_quant.calibrate.moments import SiteMoments
from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.pipeline import RunOptions, quantize_model
from cann_llm_quant.pipeline.calibration_text import calibration_windows
from cann_llm_quant.pipeline.linear import sites_to_unfold
from cann_llm_quant.pipeline.site import FloatLinear, solve_site
from cann_llm_quant.quant import rtn
from cann_llm_quant.quant.scheme import Scheme
from cann_llm_quant.recipe import EFFORTS, Calibration, Recipe

STATIC = {"bits": 8, "group_size": -1, "activations": {"dynamic": False}}
TOKEN = {"bits": 8, "group_size": -1, "activations": {}}
TENSOR = {"bits": 4, "group_size": "tensor"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that differ by row and by column, so that a factor helps some linears of a site and hurts others."""
    model = save_tiny(tmp_path_factory.mktemp("model") / "model", intermediate_size=96, num_hidden_layers=1)
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            tensor *= torch.empty(tensor.shape[0], 1).log_normal_(0, 0.7, generator=generator)
            tensor *= torch.empty(tensor.shape[1]).log_normal_(0, 0.7, generator=generator)
        elif "layernorm" in name:
            tensor *= torch.empty(tensor.shape).log_normal_(0, 0.7, generator=generator)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


def calibration(text: Path) -> Calibration:
    return Calibration(data=(str(text),), samples=4, length=32)


def reported(model: Path, out: Path, text: Path, **fields: Any) -> dict[str, dict[str, float]]:
    recipe = Recipe.model_validate({"calibration": calibration(text)} | fields)
    quantize_model(str(model), out, recipe, options=RunOptions())
    return dict(json.loads((out / "inference_config.json").read_text(encoding="utf-8"))["linears"])


def worse_than_rounding(found: dict[str, dict[str, float]]) -> dict[str, tuple[float, float]]:
    return {m: (e["rtn_error"], e["error"]) for m, e in found.items() if e["error"] > e["rtn_error"]}


@pytest.mark.parametrize(
    ("method", "scheme"),
    [
        ("awq", TENSOR),
        ("smoothquant+awq", STATIC),
        ("smoothquant+gptq", TENSOR | {"activations": {"dynamic": False, "range": "mse"}}),
    ],
)
def test_no_linear_is_worse_than_plain_rounding(
    tmp_path: Path, model: Path, text: Path, method: str, scheme: dict[str, Any]
) -> None:
    assert not worse_than_rounding(reported(model, tmp_path / "out", text, method=method, scheme=scheme))


@pytest.mark.shared
@pytest.mark.parametrize(
    ("method", "scheme"),
    [("awq", TENSOR), ("smoothquant", STATIC), ("smoothquant", TOKEN), ("smoothquant+gptq", STATIC)],
)
def test_no_linear_of_a_trained_model_is_worse(
    tmp_path: Path, shared: Path, method: str, scheme: dict[str, Any]
) -> None:
    """Without undoing factors, 3 to 15 of the 35 linears were."""
    text = shared / "data" / "text" / "stories_generated.txt"
    stories = Calibration(data=(str(text),), samples=8, length=128)
    model = shared / "data" / "models" / "stories260k"
    found = reported(model, tmp_path / "out", text, method=method, scheme=scheme, calibration=stories)
    assert not worse_than_rounding(found)


def first_inputs(model: Path, text: Path) -> Tensor:
    """What q, k and v of the first layer read, in float64: embeddings under the first norm."""
    with open_checkpoint(str(model)) as source:
        arch = arch_from_checkpoint(source)
        ids, _ = calibration_windows(source, arch, calibration(text), allow_fewer=False, tell=lambda event: None)
    tensors = load_file(model / "model.safetensors")
    x = tensors["model.embed_tokens.weight"].double()[ids.flatten()]
    x = x / (x.square().mean(-1, keepdim=True) + arch.rms_norm_eps).sqrt()
    return x * tensors["model.layers.0.input_layernorm.weight"].double()


@pytest.mark.parametrize("scheme", [STATIC, TOKEN], ids=["static", "token"])
def test_both_figures_are_of_quantized_inputs_and_the_same_for_every_method(
    tmp_path: Path, model: Path, text: Path, scheme: dict[str, Any]
) -> None:
    """By hand: int8 codes of weights and inputs, `|x ΔWᵀ|² + |Δx Wᵀ|²` relative to `|x Wᵀ|²`."""
    name = "model.layers.0.self_attn.k_proj"
    w, x = load_file(model / "model.safetensors")[f"{name}.weight"].double(), first_inputs(model, text)

    def int8(values: Tensor, largest: Tensor) -> Tensor:
        return (values / (largest / 127.5)).round().clamp(-128, 127) * (largest / 127.5)

    scale = (w.abs().amax(1, keepdim=True) / 127.5).to(torch.bfloat16).double()
    moved_w = (w / scale).round().clamp(-128, 127) * scale - w
    dynamic = scheme["activations"].get("dynamic", True)
    moved_x = int8(x, x.abs().amax(-1, keepdim=True) if dynamic else x.abs().max()) - x
    energy = (x @ w.T).square().sum()
    # The weights' part is 5 % off at most: a Gram matrix of 128 tokens is shrunk towards its diagonal.
    expected = float(((x @ moved_w.T).square().sum() + (moved_x @ w.T).square().sum()) / energy)

    for number, method in enumerate(("smoothquant", "smoothquant+gptq")):
        entry = reported(model, tmp_path / str(number), text, method=method, scheme=scheme, effort="fast")[name]
        assert entry["rtn_error"] == pytest.approx(expected, rel=0.05), method
        assert entry["error"] <= entry["rtn_error"], method


def test_linears_that_share_a_scale_are_all_rounded_plainly_where_the_searched_scale_hurts_one() -> None:
    generator = torch.Generator().manual_seed(0)
    many, few = torch.randn(64, 32, generator=generator), 0.1 * torch.randn(2, 32, generator=generator)
    few[0, 0] = 12.0  # the search cuts it for the sake of the many, and it is all that its linear computes
    x = torch.randn(400, 32, generator=generator)
    moments = SiteMoments(x.T @ x, None, None, 400)
    scheme, largest = Scheme("int4", True, "tensor", None), 12.0
    linears = {
        name: FloatLinear(
            w, rtn.solve(w, scheme, torch.float32, amax=largest).dequantize(), scheme, torch.float32, largest
        )
        for name, w in (("many", many), ("few", few))
    }
    solved = solve_site(linears, moments, EFFORTS["fast"])
    assert all(solved.linears[m].error == solved.plain[m] for m in linears)
    assert torch.equal(solved.linears["many"].weight.scale, solved.linears["few"].weight.scale)


def test_a_factor_is_blamed_at_the_linears_own_site_first(model: Path) -> None:
    with open_checkpoint(str(model)) as source:
        layer = arch_from_checkpoint(source).layers[0]
    worse = {layer.linear("k").module: {"rtn_error": 1.0, "error": 1.1}}
    assert sites_to_unfold(layer, {"qkv", "o", "down"}, worse) == {"qkv"}
    # v shares its scale with k, and o's factor divided its rows.
    assert sites_to_unfold(layer, {"o", "down"}, worse) == {"o"}
    assert sites_to_unfold(layer, {"down"}, worse) == set()
