"""`--kv-cache auto`: costs against a whole model run in memory, and the choice against every mix there is."""

import itertools
from pathlib import Path

import pytest
import torch
from tiny_models import save_text, save_tiny
from torch import Tensor

from cann_llm_quant.calibrate.kv_ranges import KvWatch
from cann_llm_quant.calibrate.state_store import StateStore
from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.errors import UsageError
from cann_llm_quant.kv_recipe import KvRecipe
from cann_llm_quant.kv_spec import parse_kv_spec
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.attention import CausalAttend
from cann_llm_quant.models.weights import load_model
from cann_llm_quant.pipeline import RunOptions, quantize_model
from cann_llm_quant.pipeline.kv_auto import CANDIDATES, _spelled, _Work, candidate_bytes, measure_layers
from cann_llm_quant.quant.kv import KvPlan, KvScales, LayerKv, kv_scale
from cann_llm_quant.recipe import Calibration, Recipe
from cann_llm_quant.runner.cached_windows import CachedWindows

CPU = torch.device("cpu")


class OneLayer:
    """Causal attention, in one layer by way of another object."""

    def __init__(self, layer: int, attend: object) -> None:
        self.layer, self.attend = layer, attend

    def __call__(self, layer: int, *args: Tensor, **more: object) -> Tensor:
        chosen = self.attend if layer == self.layer else CausalAttend()
        return chosen(layer, *args, **more)  # type: ignore[operator,no-any-return]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), dtype=torch.float32)


def test_costs_are_those_of_one_layer_s_cache_in_the_whole_model(model: Path, tmp_path: Path) -> None:
    ids = torch.randint(3, 128, (2, 80), generator=torch.Generator().manual_seed(2))
    wanted = KvRecipe(scheme="auto", page_size=16)
    with open_checkpoint(str(model)) as checkpoint, torch.no_grad():
        arch = arch_from_checkpoint(checkpoint)
        store = StateStore(2, budget=1 << 30, scratch=tmp_path, device=CPU)
        damage = measure_layers(_Work(checkpoint, arch, ids, wanted, CPU, torch.float32, lambda _: None), store)
        whole = load_model(checkpoint, arch, CPU, torch.float32)
        reference = torch.stack([whole(row[None])[0] for row in ids]).double().log_softmax(-1)
        for layer, name in ((0, 2), (1, 1), (1, 4)):
            (schemes,) = parse_kv_spec(CANDIDATES[name], 1)
            watch = KvWatch()
            for row in ids:
                whole(row[None], attend=OneLayer(layer, watch))
            k = watch.finish()[0]  # type: ignore[index]
            v = watch.finish()[1]  # type: ignore[index]
            scales = KvScales()
            if not schemes.k.dynamic:  # type: ignore[union-attr]
                k_scale, _ = kv_scale(k.minimum[:, None], k.maximum[:, None], schemes.k)
                v_low, v_high = v.minimum.amin(1)[:, None, None], v.maximum.amax(1)[:, None, None]
                v_scale = None if schemes.v.dynamic else kv_scale(v_low, v_high, schemes.v)[0]  # type: ignore[union-attr]
                scales = KvScales(k_scale, None, v_scale, None)
            layers, table = [LayerKv(), LayerKv()], [KvScales(), KvScales()]
            layers[layer], table[layer] = schemes, scales
            attend = CachedWindows(KvPlan(tuple(layers), tuple(table)), ids, page_size=16)
            logits = torch.stack([whole(row[None], attend=OneLayer(layer, attend))[0] for row in ids])
            kl = (reference.exp() * (reference - logits.double().log_softmax(-1))).sum(-1).mean()
            assert damage[layer][name] == pytest.approx(float(kl), rel=1e-2, abs=1e-9)
        assert damage[0][0] == 0.0
        assert 0 < damage[0][1] < damage[0][4]


def test_the_choice_is_the_best_of_all_mixes_and_is_stored_by_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage = [[0.0, 3.0, 5.0, 40.0, 300.0], [0.0, 30.0, 31.0, 60.0, 90.0]]
    monkeypatch.setattr("cann_llm_quant.pipeline.kv_auto.measure_layers", lambda work, store: damage)
    text = save_text(tmp_path / "text.txt")
    recipe = Recipe(
        method="none",
        kv_cache=KvRecipe(scheme="auto 60%"),
        calibration=Calibration(data=(str(text),), samples=4, length=32),
    )
    messages: list[str] = []
    quantize_model(
        str(model),
        tmp_path / "out",
        recipe,
        options=RunOptions(),
        progress=lambda event: messages.append(event.message or ""),
    )
    with open_checkpoint(str(model)) as checkpoint:
        sizes = [candidate_bytes(arch_from_checkpoint(checkpoint), name, 32) for name in CANDIDATES]
    mixes = itertools.product(range(len(CANDIDATES)), repeat=2)
    allowed = [mix for mix in mixes if sum(sizes[c] for c in mix) <= 0.6 * 2 * sizes[0]]
    best = min(allowed, key=lambda mix: sum(row[c] for row, c in zip(damage, mix, strict=True)))
    stored = Recipe.model_validate_json((tmp_path / "out" / "recipe.json").read_text(encoding="utf-8"))
    assert stored.kv_cache is not None
    assert stored.kv_cache.scheme == _spelled(best)
    assert f"KV cache auto: {_spelled(best)}" in messages


def test_bytes_count_scales_of_pages(model: Path) -> None:
    with open_checkpoint(str(model)) as checkpoint:
        arch = arch_from_checkpoint(checkpoint)  # 2 heads of 16 channels
    numbers = 2 * 32 * 16
    assert candidate_bytes(arch, "float", 32) == 2 * numbers * 2
    assert candidate_bytes(arch, "k=int8-channel v=int8-token", 32) == 2 * numbers + 2 * 32 * 2
    assert candidate_bytes(arch, "int4", 32) == numbers + 2 * 16 * 4 + 2 * 32 * 4


def test_layers_are_spelled_in_ranges_that_read_back() -> None:
    chosen = [0, 0, 2, 1, 2, 2, 0]
    layers = parse_kv_spec(_spelled(chosen), 7)
    assert _spelled(chosen).startswith("0-1,6: float; 3: ")
    assert layers == tuple(parse_kv_spec(CANDIDATES[c], 1)[0] for c in chosen)


def test_a_budget_that_nothing_meets_and_auto_where_nothing_measures_are_refused(model: Path, tmp_path: Path) -> None:
    text = save_text(tmp_path / "text.txt")
    calibration = Calibration(data=(str(text),), samples=2, length=32)
    recipe = Recipe(method="none", kv_cache=KvRecipe(scheme="auto 10%"), calibration=calibration)
    with pytest.raises(UsageError, match="the smallest mix takes"):
        quantize_model(str(model), tmp_path / "out", recipe, options=RunOptions())
    with pytest.raises(UsageError, match="the KV cache auto is measured by quantize"):
        parse_kv_spec("auto", 4)
    with pytest.raises(UsageError, match="no share of the bytes"):
        parse_kv_spec("auto 0%", 4)
