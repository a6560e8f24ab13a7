"""Field cases that only the whole way from a model's folder to a running output shows: C48, C52, C53, C56, C62."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_text, save_tiny

from cann_llm_quant.cli.main import main

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 2,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text(tmp_path_factory.mktemp("text") / "words.txt", tokens=1000)


def quantize(model: Path, output: Path, text: Path, *words: str) -> None:
    options = ["--data", str(text), "--samples", "4", "--seq-len", "32", "--group-size", "32"]
    assert main(["quantize", str(model), "-o", str(output), *options, *words]) == 0


def edit(path: Path, **fields: Any) -> None:
    """Change fields of a JSON file."""
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(document | fields), encoding="utf-8")


def test_c48_no_padding_token_is_needed_and_none_is_added(text: Path, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", num_hidden_layers=1)
    assert "pad_token" not in json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    quantize(model, tmp_path / "out", text)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()


def test_c56_senseless_generation_config_is_copied_and_not_fatal(text: Path, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", num_hidden_layers=1)
    edit(model / "generation_config.json", do_sample=False, temperature=0.6, top_p=0.9)
    quantize(model, tmp_path / "out", text)
    copied, original = (folder / "generation_config.json" for folder in (tmp_path / "out", model))
    assert copied.read_bytes() == original.read_bytes()
    assert main(["run", str(tmp_path / "out"), "-p", "w5", "--max-new-tokens", "2"]) == 0


@pytest.mark.parametrize("reference", ["modeling.Model", "other/repo--modeling.Model"])
def test_c62_code_in_the_folder_is_neither_run_nor_copied(text: Path, tmp_path: Path, reference: str) -> None:
    model, marker = save_tiny(tmp_path / "model", num_hidden_layers=1), tmp_path / "marker"
    code = f"open({str(marker)!r}, 'w').close()\n\n\nclass Model:\n    pass\n"
    (model / "modeling.py").write_text(code, encoding="utf-8")
    edit(model / "config.json", auto_map={"AutoConfig": reference, "AutoModelForCausalLM": reference})
    edit(model / "tokenizer_config.json", auto_map={"AutoTokenizer": [reference, None]})
    quantize(model, tmp_path / "out", text)
    assert main(["run", str(tmp_path / "out"), "-p", "w5", "--max-new-tokens", "2"]) == 0
    assert not marker.exists()
    assert not list((tmp_path / "out").glob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))


def test_c52_every_expert_says_how_many_tokens_it_saw(text: Path, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "qwen2_moe", **EXPERTS)
    quantize(model, tmp_path / "out", text)
    document = json.loads((tmp_path / "out" / "inference_config.json").read_text(encoding="utf-8"))
    for layer in range(2):
        names = [f"model.layers.{layer}.mlp.experts.{expert}.gate_proj" for expert in range(4)]
        assert sum(document["linears"][name]["tokens"] or 0 for name in names) == 2 * 4 * 32  # top-2 of 4 x 32 tokens


def test_c53_dense_and_ignored_expert_layers_load_and_run(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = EXPERTS | {"num_hidden_layers": 3, "mlp_only_layers": [0]}
    model, output = save_tiny(tmp_path / "model", "qwen2_moe", **shape), tmp_path / "out"
    quantize(model, output, text, "--bits", "8", "--ignore", r"re:model\.layers\.1\.mlp\..*")
    capsys.readouterr()
    words = ["--reference", str(model), "--data", str(text), "--window", "32", "--max-increase", "1%", "--json"]
    assert main(["perplexity", str(output), *words]) == 0
    assert json.loads(capsys.readouterr().out)["divergence"]["top1_agreement"] > 0.9
    assert main(["run", str(output), "-p", "w5 w6", "--max-new-tokens", "3"]) == 0
