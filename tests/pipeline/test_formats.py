"""One quantization in several layouts: refused before work, resumed by what is missing, the same codes in each."""

import json
from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from cann_llm_quant.errors import UnsupportedError, UsageError
from cann_llm_quant.export.layouts import LAYOUTS, ExportOptions, check_options
from cann_llm_quant.export.packed import open_packed
from cann_llm_quant.kv_recipe import KvRecipe
from cann_llm_quant.pipeline import RunOptions, quantize_into
from cann_llm_quant.pipeline.formats import Quantized
from cann_llm_quant.recipe import Format, Recipe, validate_recipe


def recipe(*formats: str, **scheme: object) -> Recipe:
    wanted = {"bits": 4, "group_size": 32, "symmetric": True} | scheme
    return validate_recipe({"method": "rtn", "scheme": wanted, "formats": list(formats)}, "test")


def run(model: Path, out: Path, wanted: Recipe, **options: object):
    return quantize_into(str(model), out, wanted, options=RunOptions(**options), exports=ExportOptions(**options))


def test_the_recipes_formats_are_the_layouts() -> None:
    assert set(Format.__args__) == (set(LAYOUTS) - {"compressed-tensors"}) | {"native"}


def test_several_layouts_hold_the_same_codes(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "m", hidden_size=128, intermediate_size=256)
    done = run(model, tmp_path / "out", recipe("awq", "gptq_v2"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["awq", "formats.json", "gptq_v2", "native"]
    assert [export.layout for export in done.exports] == ["awq", "gptq_v2"]
    with open_packed(tmp_path / "out" / "native") as native:
        for layout in ("awq", "gptq_v2"):
            with open_packed(tmp_path / "out" / layout) as other:
                assert other.modules == native.modules
                for module in native.modules:
                    assert torch.equal(other.quantized(module).codes, native.quantized(module).codes)
                    assert torch.equal(other.load(f"{module}.weight"), native.load(f"{module}.weight"))


def test_a_run_that_was_stopped_between_layouts_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny(tmp_path / "m", hidden_size=128, intermediate_size=256)
    out, wanted = tmp_path / "out", recipe("float", "awq", "gptq")
    with monkeypatch.context() as patch:
        patch.setattr("cann_llm_quant.export.gptq.GptqEncoder.files", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(model, out, wanted)
    assert not (out / "gptq").exists()
    before = (out / "awq" / "model.safetensors").stat().st_mtime_ns
    done = run(model, out, wanted)
    assert done.report is None
    assert (out / "awq" / "model.safetensors").stat().st_mtime_ns == before
    assert (out / "gptq" / "quantize_config.json").is_file()
    with pytest.raises(UsageError, match="formats of another run"):
        run(model, out, recipe("awq", "gptq", group_size=64))
    again = run(model, out, recipe("awq", "gptq", group_size=64), overwrite=True)
    assert again.report is not None
    assert json.loads((out / "gptq" / "quantize_config.json").read_text())["group_size"] == 64


def test_what_a_layout_cannot_hold_is_refused_before_anything_is_quantized(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "m", hidden_size=128, intermediate_size=256)
    # --requantize and --regroup are flags of another command
    with pytest.raises(UnsupportedError, match=r"AWQ holds 4 bits; choose another scheme, other bits or groups$"):
        run(model, tmp_path / "out", recipe("awq", bits=8))
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["formats.json"]
    with pytest.raises(UsageError, match="--dialect is for onnx"):
        quantize_into(
            str(model),
            tmp_path / "other",
            recipe("awq"),
            options=RunOptions(),
            exports=ExportOptions(dialect="cann"),
        )
    assert not (tmp_path / "other").exists()


def test_options_go_to_the_layouts_that_take_them(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "m", hidden_size=128, intermediate_size=256)
    exports = ExportOptions(runtime="vllm-ascend-0.25")
    done = quantize_into(str(model), tmp_path / "out", recipe("ascend", "awq"), options=RunOptions(), exports=exports)
    assert [export.layout for export in done.exports] == ["ascend", "awq"]
    with pytest.raises(UsageError, match="--runtime is for ascend, not for compressed-tensors; leave it out"):
        quantize_into(str(model), tmp_path / "alone", recipe("native"), options=RunOptions(), exports=exports)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": False}, "--no-tokenizer is for gguf, not for float"),
        ({"kv_cache": False}, "--no-kv-cache is for ascend, not for float"),
        ({"requantize": True}, "--requantize is for compressed-tensors and .*, not for float"),
        ({"regroup": 32}, "--regroup is for compressed-tensors and .*, not for float"),
    ],
)
def test_options_that_a_layout_would_not_heed_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_options(ExportOptions(**options), "float")


def test_a_folder_of_somebody_else_is_not_filled(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "m", hidden_size=128, intermediate_size=256)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letters.txt").write_text("dear", encoding="utf-8")
    with pytest.raises(UsageError, match="exists already"):
        run(model, tmp_path / "out", recipe("awq"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["letters.txt"]


def test_flags_can_be_corrected_after_a_refusal(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "m", hidden_size=128, intermediate_size=256)
    with pytest.raises(UnsupportedError, match="AWQ holds 4 bits"):
        run(model, tmp_path / "out", recipe("awq", bits=8))
    assert run(model, tmp_path / "out", recipe("awq")).report is not None


def test_layouts_made_for_another_runtime_are_not_taken_for_those_asked_for(tmp_path: Path) -> None:
    model, out = save_tiny(tmp_path / "m", hidden_size=128, intermediate_size=256), tmp_path / "out"

    def run_for(runtime: str, **options: bool):
        exports = ExportOptions(runtime=runtime, **options)
        return quantize_into(str(model), out, recipe("ascend"), options=RunOptions(**options), exports=exports)

    run_for("vllm-ascend-0.23")
    assert run_for("vllm-ascend-0.23").report is None
    with pytest.raises(UsageError, match="formats of another run"):
        run_for("vllm-ascend-0.25")
    assert run_for("vllm-ascend-0.25", overwrite=True).report is not None


def test_a_native_output_that_was_to_be_replaced_is_not_taken_for_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = save_tiny(tmp_path / "m", hidden_size=128, intermediate_size=256), tmp_path / "out"
    run(model, out, recipe("awq"))
    with monkeypatch.context() as patch:
        patch.setattr("cann_llm_quant.pipeline.formats.quantize_model", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(model, out, recipe("awq", group_size=64), overwrite=True)
    for wanted in (recipe("awq", group_size=64), recipe("awq")):
        with pytest.raises(UsageError, match="formats of another run"):
            run(model, out, wanted)
    run(model, out, recipe("awq", group_size=64), overwrite=True)
    assert run(model, out, recipe("awq", group_size=64)).report is None
    config = json.loads((out / "awq" / "config.json").read_text())
    assert config["quantization_config"]["group_size"] == 64


def test_a_cache_that_a_layout_cannot_hold_is_refused_before_anything_is_quantized(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "m", hidden_size=128, intermediate_size=256)
    told = []

    def attempt(layout: str, cache: str, **values: float) -> None:
        wanted = recipe(layout).model_copy(update={"kv_cache": KvRecipe(scheme=cache, **values)})
        options, exports = RunOptions(), ExportOptions()
        quantize_into(str(model), tmp_path / "out", wanted, options=options, exports=exports, progress=told.append)

    with pytest.raises(UnsupportedError, match="layer 0 keeps K of the KV cache in int8-asym-channel; ascend holds"):
        attempt("ascend", "int8-channel-asym-static", scale=0.1)
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["formats.json"]
    attempt("awq", "int8-token")
    warnings = [event.message for event in told if event.warning]
    assert "awq: AWQ cannot say how keys and values are cached; the KV cache's format is left out" in warnings


def test_another_model_under_the_same_name_is_not_taken_for_the_one_that_was_quantized(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "m", hidden_size=128, intermediate_size=256)
    run(model, tmp_path / "out", recipe("awq"))
    save_tiny(model, seed=5, hidden_size=128, intermediate_size=256)
    with pytest.raises(UsageError, match="formats of another run"):
        run(model, tmp_path / "out", recipe("awq"))


def test_a_gguf_output_that_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = save_tiny(tmp_path / "m", hidden_size=128, intermediate_size=256), tmp_path / "out"

    def quantize() -> Quantized:
        asked = ExportOptions(tokenizer=False)
        return quantize_into(str(model), out, recipe("gguf", "gptq"), options=RunOptions(), exports=asked)

    with monkeypatch.context() as patch:
        patch.setattr("cann_llm_quant.export.gptq.GptqEncoder.files", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            quantize()
    (file,) = (out / "gguf").glob("*.gguf")
    before = file.stat().st_mtime_ns
    assert [export.layout for export in quantize().exports] == ["gguf", "gptq"]
    assert file.stat().st_mtime_ns == before


def test_a_tokenizer_that_gguf_has_no_word_for_is_refused_before_anything_is_quantized(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "m", hidden_size=128, intermediate_size=256)
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(model)
    with pytest.raises(UnsupportedError, match=r"WordLevel.*--no-tokenizer"):
        run(model, tmp_path / "out", recipe("gguf"))
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["formats.json"]
