"""C55, C28: a run killed with SIGKILL at any point ends bit-identical to one that was not."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import save_text, save_tiny

from cann_llm_quant.errors import ResumeError, UsageError
from cann_llm_quant.pipeline import RunOptions, quantize_model
from cann_llm_quant.recipe import Calibration, Recipe, WeightScheme

DRIVER = Path(__file__).with_name("kill_driver.py")
SPOOLED, IN_MEMORY = 0, 1 << 30


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def drive(
    model: Path, out: Path, text: Path, budget: int, points: list[int], method: str = "awq", effort: str = "balanced"
) -> dict[str, object]:
    command = [sys.executable, str(DRIVER), str(model), str(out), str(text), method, effort, str(budget)]
    command += map(str, points)
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return dict(json.loads(result.stdout))


@pytest.mark.parametrize("budget", [SPOOLED, IN_MEMORY])
def test_killed_runs_end_bit_identical(tmp_path: Path, budget: int) -> None:
    model, text = save_tiny(tmp_path / "model", num_hidden_layers=3), save_text(tmp_path / "text.txt")
    whole = drive(model, tmp_path / "whole", text, SPOOLED, [])
    assert whole == {"endings": [], "resumed": 0}
    # A layer takes 14 events: some points fall into measuring, some into propagating, some behind the first layer.
    points = random.Random(budget).sample(range(2, 22), 5)
    killed = drive(model, tmp_path / "killed", text, budget, points)
    assert killed["endings"][:3] == [-9, -9, -9]  # type: ignore[index]
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert not (tmp_path / "killed.partial").exists()


@pytest.mark.parametrize(
    ("budget", "method", "effort", "family"),
    [
        (SPOOLED, "gptq", "balanced", "llama"),
        (IN_MEMORY, "gptq", "balanced", "llama"),
        (IN_MEMORY, "awq+gptq", "best", "llama"),
        (IN_MEMORY, "gptq", "balanced", "qwen2_moe"),
    ],
)
def test_feedback_killed_ends_bit_identical(tmp_path: Path, budget: int, method: str, effort: str, family: str) -> None:
    model, text = save_tiny(tmp_path / "model", family, num_hidden_layers=3), save_text(tmp_path / "text.txt")
    drive(model, tmp_path / "whole", text, IN_MEMORY, [], method, effort)
    # A layer takes some 40 events; more with tuning. Both streams have to be found or computed again.
    killed = drive(model, tmp_path / "killed", text, budget, [12, 58, 30], method, effort)
    assert killed["endings"][:2] == [-9, -9]  # type: ignore[index]
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert not (tmp_path / "killed.partial").exists()


@pytest.mark.parametrize(
    ("budget", "method", "scheme", "points", "resumed"),
    [
        # smoothing and measuring take 14 events a layer: killed in layer 1, then in 2, then in 3
        (SPOOLED, "none", {"scheme": "int8-head", "smooth": True}, [12, 26, 19], 2),
        (IN_MEMORY, "gptq", {"scheme": "k=int8-channel v=int8-asym-head"}, [60, 58], 2),
        # the choice takes 132 events and 8 a layer: killed while it is measured as a whole, then in layer 2
        (
            SPOOLED,
            "none",
            {"scheme": "auto", "candidates": ["int4-token", "int8-channel", "fp16"], "page_size": 16},
            [90, 145],
            1,
        ),
    ],
)
def test_killed_runs_of_the_kv_cache_end_bit_identical(
    tmp_path: Path, budget: int, method: str, scheme: dict[str, object], points: list[int], resumed: int
) -> None:
    model, text = save_tiny(tmp_path / "model", num_hidden_layers=3), save_text(tmp_path / "text.txt")
    recipe = json.dumps({"method": method, "kv_cache": scheme})
    drive(model, tmp_path / "whole", text, IN_MEMORY, [], recipe)
    killed = drive(model, tmp_path / "killed", text, budget, points, recipe)
    assert killed == {"endings": [-9] * len(points), "resumed": resumed}
    whole = contents(tmp_path / "whole")
    assert {"kv_cache/scales.safetensors", "inference_config.json"} <= whole.keys()
    assert contents(tmp_path / "killed") == whole
    assert not (tmp_path / "killed.partial").exists()


def test_late_kill_resumes_after_the_whole_layers(tmp_path: Path) -> None:
    model, text = save_tiny(tmp_path / "model", num_hidden_layers=3), save_text(tmp_path / "text.txt")
    result = drive(model, tmp_path / "out", text, SPOOLED, [35])
    assert result["endings"] == [-9]
    assert result["resumed"] == 2


def test_changed_settings_data_or_source_refuse_to_resume_and_say_what_differs(tmp_path: Path) -> None:
    model, text = save_tiny(tmp_path / "model", num_hidden_layers=3), save_text(tmp_path / "text.txt")
    recipe = Recipe(calibration=Calibration(data=(str(text),), samples=4, length=32))

    def stop(event: object) -> None:
        if getattr(event, "layer", None) == "layer 2/3":
            raise KeyboardInterrupt

    def attempt(changed: Recipe, **options: object) -> None:
        quantize_model(str(model), tmp_path / "out", changed, options=RunOptions(**options))  # type: ignore[arg-type]

    with pytest.raises(KeyboardInterrupt):
        quantize_model(str(model), tmp_path / "out", recipe, options=RunOptions(), progress=stop)
    with pytest.raises(ResumeError, match="group_size"):
        attempt(recipe.model_copy(update={"scheme": WeightScheme(group_size=32)}))
    with pytest.raises(ResumeError, match="max_shard_bytes"):
        attempt(recipe, max_shard_bytes=1000)
    save_text(text, seed=1)
    with pytest.raises(ResumeError, match="corpus"):
        attempt(recipe)
    save_text(text)
    save_tiny(model, seed=5, num_hidden_layers=3)
    with pytest.raises(ResumeError, match="source"):
        attempt(recipe)
    save_tiny(model, num_hidden_layers=3)
    attempt(recipe)
    with pytest.raises(UsageError, match="out"):
        attempt(recipe)
