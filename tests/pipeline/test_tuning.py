"""Tuning a layer: scales that are off are brought back, codes stay, and what does not help is not kept."""

from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny

from cann_llm_quant.calibrate.stream import run_layer
from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.decoder import DecoderLayer, DenseLinear
from cann_llm_quant.models.weights import build_layer, load_layer
from cann_llm_quant.pipeline.tuning import _ScaledLinear, tune_layer
from cann_llm_quant.quant import rtn
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme

WINDOWS = 12


class Case:
    """A float layer, its inputs and outputs, and the layer with 4-bit weights whose scales are all 4 % too large."""

    def __init__(self, folder: Path) -> None:
        with open_checkpoint(str(save_tiny(folder, dtype=torch.float32))) as source:
            arch = arch_from_checkpoint(source)
            tensors = load_layer(source, arch, 0, torch.device("cpu"), torch.float32)
        self.float_layer = build_layer(arch, 0, tensors)
        self.x = torch.randn(WINDOWS, 24, arch.hidden_size, generator=torch.Generator().manual_seed(0)).split(1)
        self.y = list(run_layer(self.float_layer, iter(self.x), 0))
        scheme = Scheme("int8", True, "group", 32)
        solved = {
            spec.role: rtn.solve(tensors[f"{spec.module}.weight"], scheme, torch.float32)
            for spec in arch.layers[0].linears
        }
        self.weights = {
            role: QuantizedTensor(weight.codes, weight.scale * 1.04, weight.zero_point, scheme)
            for role, weight in solved.items()
        }
        linears = {role: DenseLinear(weight.dequantize()) for role, weight in self.weights.items()}
        self.running = DecoderLayer(arch, arch.layers[0], linears, dict(self.float_layer.parameters))
        self.dtypes = dict.fromkeys(self.running.parameters, torch.float32)

    def pair(self, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[window], self.y[window]


def test_scales_that_are_off_come_back_and_codes_stay(tmp_path: Path) -> None:
    case = Case(tmp_path)
    with torch.no_grad():
        tuned = tune_layer(case.running, case.weights, case.dtypes, case.pair, WINDOWS, steps=60, seed=0)
    assert tuned is not None
    assert tuned.after < 0.3 * tuned.before
    for role, weight in tuned.weights.items():
        assert torch.equal(weight.codes, case.weights[role].codes)
        assert (weight.scale / case.weights[role].scale).mean() < 0.99


def test_the_same_seed_gives_the_same_scales(tmp_path: Path) -> None:
    case = Case(tmp_path)
    with torch.no_grad():
        a, b = (tune_layer(case.running, case.weights, case.dtypes, case.pair, WINDOWS, steps=3, seed=1) for _ in "ab")
    assert a is not None
    assert b is not None
    assert all(torch.equal(a.weights[role].scale, b.weights[role].scale) for role in a.weights)


def test_what_does_not_help_on_held_out_windows_is_not_kept(tmp_path: Path) -> None:
    case = Case(tmp_path)

    def lie(window: int) -> tuple[torch.Tensor, torch.Tensor]:
        # The windows that are learnt from want larger outputs, those that are held out smaller ones.
        x, y = case.pair(window)
        return x, y if window % 8 == 0 else x + 1.5 * (y - x)

    with torch.no_grad():
        assert tune_layer(case.running, case.weights, case.dtypes, lie, WINDOWS, steps=10, seed=0) is None


@pytest.mark.parametrize("windows", [0, 1])
def test_too_few_windows_change_nothing(tmp_path: Path, windows: int) -> None:
    case = Case(tmp_path)
    assert tune_layer(case.running, case.weights, case.dtypes, case.pair, windows, steps=3, seed=0) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_stay_positive_whatever_the_steps_made_of_them(dtype: torch.dtype) -> None:
    weight = rtn.solve(torch.ones(2, 64), Scheme("int4", True, "group", 32), dtype)
    linear = _ScaledLinear(weight, None)
    with torch.no_grad():
        linear.change.copy_(torch.tensor([[-2.0, -1.0], [1e38, 0.5]]).unsqueeze(-1))
    stored = linear.stored().scale
    assert stored.dtype == dtype
    assert bool(((stored > 0) & stored.isfinite()).all())
    assert stored[1, 1] == (1.5 * weight.scale[1, 1].float()).to(dtype)
