"""Sketches of inputs against the raw values, and torch's own moving-average observer."""

import math

import pytest
import torch
from torch.ao.quantization import MovingAverageMinMaxObserver

from cann_llm_quant.calibrate.input_sketches import SketchCollector
from cann_llm_quant.errors import NumericError
from cann_llm_quant.quant.activation_ranges import static_range
from cann_llm_quant.quant.scheme import ActivationScheme
from cann_llm_quant.quant.value_sketch import bucket_counts


def test_a_sketch_counts_all_windows_and_keeps_the_extremes() -> None:
    generator = torch.Generator().manual_seed(0)
    windows = [torch.randn(n, 6, generator=generator) for n in (3, 1, 7)]
    collector = SketchCollector(["down", "experts.1.down"])
    for x in windows:
        collector.observe("down", x)
        collector.observe("qkv", x)
    (found,) = collector.finish().items()
    site, sketch = found
    whole = torch.cat(windows)
    assert site == "down"
    assert torch.equal(sketch.counts, bucket_counts(whole))
    assert (sketch.low, sketch.high, sketch.tokens) == (float(whole.min()), float(whole.max()), 11)


def test_moving_extremes_are_those_of_torchs_observer() -> None:
    generator = torch.Generator().manual_seed(0)
    collector, observer = SketchCollector(["o"]), MovingAverageMinMaxObserver(averaging_constant=0.01)
    for size in (1.0, 5.0, 0.5, 20.0):
        x = torch.randn(50, 8, generator=generator) * size
        collector.observe("o", x)
        observer(x)
    sketch = collector.finish()["o"]
    torch.testing.assert_close(torch.tensor(sketch.moving_low), observer.min_val)
    torch.testing.assert_close(torch.tensor(sketch.moving_high), observer.max_val)


def test_c06_nan_is_not_lost_in_the_extremes() -> None:
    collector = SketchCollector(["o"])
    collector.observe("o", torch.tensor([[1.0, float("nan")], [2.0, -1.0]]))
    collector.observe("o", torch.ones(1, 2))
    sketch = collector.finish()["o"]
    assert math.isnan(sketch.low)
    with pytest.raises(NumericError):
        static_range(sketch, ActivationScheme(dynamic=False, strategy="tensor"))


def test_positive_inputs_have_a_range_that_holds_zero() -> None:
    collector = SketchCollector(["o"])
    collector.observe("o", torch.tensor([[3.0, 4.0]]))
    sketch = collector.finish()["o"]
    assert (sketch.low, sketch.moving_low, sketch.high) == (0.0, 0.0, 4.0)
