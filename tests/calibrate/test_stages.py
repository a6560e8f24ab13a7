"""The walk through a layer, site by site: same bits as running the layer, moments as literal sums over tokens."""

from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny

from cann_llm_quant.calibrate.moments import MomentSums
from cann_llm_quant.calibrate.stages import StagedLayer
from cann_llm_quant.calibrate.state_store import StateStore
from cann_llm_quant.calibrate.stream import HiddenStates, run_layer
from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.decoder import DecoderLayer, DenseLinear
from cann_llm_quant.models.weights import build_layer, load_layer
from cann_llm_quant.pipeline.measure import trusted_moments

WINDOWS, LENGTH = 5, 12
CPU = torch.device("cpu")


class Model:
    """One layer of a tiny model, and states of two streams before it."""

    def __init__(self, folder: Path, family: str, budget: int, **config: bool) -> None:
        with open_checkpoint(str(save_tiny(folder / "model", family, **config))) as source:
            self.arch = arch_from_checkpoint(source)
            self.tensors = load_layer(source, self.arch, 0, CPU, torch.float32)
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(WINDOWS, LENGTH, self.arch.hidden_size, generator=generator)
        self.y = self.x + 0.1 * torch.randn(self.x.shape, generator=generator)
        self.scratch, self.budget = folder / "scratch", budget
        self.scratch.mkdir()

    def layer(self) -> DecoderLayer:
        return build_layer(self.arch, 0, self.tensors)

    def states(self, name: str, values: torch.Tensor) -> HiddenStates:
        states = HiddenStates(
            tuple(values.shape), torch.float32, budget=self.budget, scratch=self.scratch, device=CPU, name=name
        )
        states._store(0, iter(values.split(1)))
        return states

    def store(self) -> StateStore:
        return StateStore(WINDOWS, budget=self.budget, scratch=self.scratch, device=CPU)


def coarse(linear: DenseLinear) -> DenseLinear:
    return DenseLinear((linear.weight * 8).round() / 8, linear.bias)


def replace_site(layer: DecoderLayer, site: str) -> None:
    for role in next(s.linears for s in layer.layer.sites if s.name == site):
        layer.linears[role] = coarse(layer.linears[role])  # type: ignore[index]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "qwen2_moe"])
@pytest.mark.parametrize("budget", [0, 1 << 30])
def test_walking_gives_the_bits_of_running_the_replaced_layer(tmp_path: Path, family: str, budget: int) -> None:
    model = Model(tmp_path, family, budget)
    walked, quantized, floats = model.layer(), model.states("states", model.y), model.states("float", model.x)
    sites = [site.name for site in walked.layer.sites]
    staged = StagedLayer(walked, quantized, model.store(), sites, float_layer=model.layer(), float_states=floats)
    seen = []
    for measured in staged.sites():
        for site in measured:
            seen.append(site)
            replace_site(walked, site)
    staged.advance()
    assert set(seen) <= set(sites)
    assert {"qkv", "o"} <= set(seen)
    whole = model.layer()
    for site in seen:
        replace_site(whole, site)
    expected = torch.cat(list(run_layer(whole, iter(model.y.split(1)), 0)))
    assert torch.equal(torch.cat(list(quantized.windows())), expected)
    expected = torch.cat(list(run_layer(model.layer(), iter(model.x.split(1)), 0)))
    assert torch.equal(torch.cat(list(floats.windows())), expected)
    assert not list(model.scratch.glob("*inner*")), "what stages kept is deleted"


def test_moments_are_the_literal_sums(tmp_path: Path) -> None:
    model = Model(tmp_path, "llama", 1 << 30)
    walked = model.layer()
    factor = torch.linspace(0.5, 2.0, model.arch.hidden_size)
    staged = StagedLayer(
        walked,
        model.states("states", model.y),
        model.store(),
        ["qkv", "o", "down"],
        float_layer=model.layer(),
        float_states=model.states("float", model.x),
        factors={"qkv": factor},
    )
    moments = {}
    for measured in staged.sites():
        moments |= measured
    assert set(moments) == {"qkv", "o", "down"}
    inputs: dict[str, dict[str, list[torch.Tensor]]] = {"x": {}, "y": {}}
    outputs = {}
    for name, values in (("x", model.x), ("y", model.y)):
        kept = inputs[name]
        runs = run_layer(
            model.layer(), iter(values.split(1)), 0, lambda site, x, kept=kept: kept.setdefault(site, []).append(x)
        )
        outputs[name] = torch.cat(list(runs)).flatten(0, 1).double()
    x, y = ({site: torch.cat(parts).double() for site, parts in inputs[name].items()} for name in ("x", "y"))
    found = moments["qkv"]
    assert found.tokens == WINDOWS * LENGTH
    torch.testing.assert_close(found.hessian.double(), y["qkv"].T @ y["qkv"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.cross.double(), (x["qkv"] / factor - y["qkv"]).T @ y["qkv"], rtol=1e-4, atol=1e-4)
    # No linear was replaced, so down leaves out just what the two models' outputs differ by.
    weight = 1 / outputs["x"].square().mean(-1, keepdim=True)
    expected = (outputs["x"] - outputs["y"]).T @ (y["down"] * weight)
    down = model.tensors[model.arch.layers[0].linear("down").module + ".weight"]
    missing = moments["down"].missing(down)
    torch.testing.assert_close(missing.double(), expected, rtol=1e-3, atol=1e-4)
    shrunk = trusted_moments("down", moments["down"])
    assert not torch.equal(shrunk.hessian, moments["down"].hessian)
    torch.testing.assert_close(shrunk.missing(down).double(), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        moments["down"].hessian.double(), (y["down"] * weight).T @ y["down"], rtol=1e-4, atol=1e-5
    )
    assert moments["down"].cross is None


@pytest.mark.parametrize("biased", [False, True])
def test_streams_that_agree_ask_for_no_correction_biases_or_not(tmp_path: Path, biased: bool) -> None:
    """A linear adds its own bias: what its weight is to give is the rest."""
    model = Model(tmp_path, "llama", 1 << 30, attention_bias=biased, mlp_bias=biased)
    assert ("model.layers.0.mlp.down_proj.bias" in model.tensors) == biased
    walked, quantized, floats = model.layer(), model.states("states", model.x), model.states("float", model.x)
    staged = StagedLayer(
        walked, quantized, model.store(), ["o", "down"], float_layer=model.layer(), float_states=floats
    )
    for measured in staged.sites():
        for site, moments in measured.items():
            linear = walked.linears[site]
            assert isinstance(linear, DenseLinear)
            missing = moments.missing(linear.weight)
            assert missing is not None
            wanted = linear.weight.double() @ moments.hessian.double()
            assert missing.double().norm() < 1e-5 * wanted.norm()
    staged.close()


def test_a_token_counts_relative_to_its_stream() -> None:
    sums = MomentSums()
    y = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    stream = torch.tensor([[1.0, 1.0, 1.0], [5.0, 5.0, 5.0]])
    sums.add(y, stream=stream)
    found = sums.finish()
    assert found is not None
    assert found.hessian.tolist() == [[1.0, 0.0], [0.0, pytest.approx(1 / 25)]]
    assert found.cross is None
    assert found.wanted is None


def test_a_token_without_a_stream_weighs_a_bounded_lot() -> None:
    sums = MomentSums()
    stream = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    sums.add(torch.eye(2), stream=stream)
    found = sums.finish()
    assert found is not None
    # The floor is a hundredth of the window's mean power, 0.5.
    assert found.hessian.diagonal().tolist() == pytest.approx([200.0, 1.0])
