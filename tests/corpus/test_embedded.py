"""What ships inside the package: sizes, provenance, independence of the held-out text, and that the model is one."""

import math
import re
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

from cann_llm_quant.corpus import default_evaluation_source, default_source, load_text, load_windows
from cann_llm_quant.tokenizer import adds_bos, check_vocabulary, encode, load_tokenizer

DATA = Path(str(files("cann_llm_quant") / "data"))
MODEL = DATA / "demo_model"
TEXT = DATA / "text"

PERPLEXITY_BOUND = 32.0  # of the held-out text; a uniform guess over the vocabulary has 1024


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def test_sizes_stay_small() -> None:
    assert (MODEL / "model.safetensors").stat().st_size < 2_000_000
    assert (TEXT / "calibration.txt").stat().st_size < 450_000
    assert 60_000 < (TEXT / "heldout.txt").stat().st_size < 80_000


def test_provenance_and_licences_lie_beside_the_data() -> None:
    for folder in (MODEL, TEXT):
        licence = (folder / "LICENSE").read_text(encoding="utf-8")
        assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence
    assert "Apache-2.0" in (MODEL / "LICENSE").read_text(encoding="utf-8")
    story = (MODEL / "README.md").read_text(encoding="utf-8") + (TEXT / "README.md").read_text(encoding="utf-8")
    for part in (
        "tools/train_demo_model.py",
        "tools/build_demo_corpus.py",
        "CPython 3.11",
        "steps",
        "held-out",
        "--seed",
    ):
        assert part in story


def paragraphs(name: str) -> set[str]:
    text = (TEXT / name).read_text(encoding="utf-8")
    return {" ".join(part.split()).lower() for part in re.split(r"\n{2,}", text)}


def test_held_out_text_shares_nothing_with_the_calibration_text() -> None:
    shared = paragraphs("heldout.txt") & paragraphs("calibration.txt")
    assert all(len(text) < 40 for text in shared), "only headings such as 'usage:' may be in both"


def test_the_texts_name_nobody() -> None:
    for name in ("calibration.txt", "heldout.txt"):
        assert not re.search(r"\w@\w+\.\w", (TEXT / name).read_text(encoding="utf-8"))


def test_the_weights_are_whole_and_in_bfloat16(model: LlamaForCausalLM) -> None:
    names = {name for name, _ in model.named_parameters()} - {"lm_head.weight"}
    with safe_open(MODEL / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == names
        assert {file.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    assert sum(parameter.numel() for parameter in model.parameters()) == 935_232
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.hidden_size % 128 == 64


def test_the_tokenizer_loads_everywhere_alike() -> None:
    ours = load_tokenizer(MODEL)
    text = load_text(default_evaluation_source()).text[:5000] + "模型 é"
    assert adds_bos(ours)
    assert encode(ours, text, bos=True) == AutoTokenizer.from_pretrained(MODEL)(text)["input_ids"]
    assert ours.decode(encode(ours, text, bos=False)) == text
    check_vocabulary(ours, 1024)
    assert (ours.bos_token_id, ours.eos_token_id) == (0, 1)
    generation = GenerationConfig.from_pretrained(MODEL)
    assert (generation.bos_token_id, generation.eos_token_id) == (0, 1)


def test_held_out_perplexity(model: LlamaForCausalLM) -> None:
    tokenizer = load_tokenizer(MODEL)
    windows = load_windows([default_evaluation_source()], tokenizer, samples=32, length=256, seed=0)
    with torch.no_grad():
        loss = model(input_ids=windows.ids, labels=windows.ids).loss
    assert math.exp(float(loss)) < PERPLEXITY_BOUND


def test_the_calibration_text_holds_the_default_number_of_windows() -> None:
    windows = load_windows([default_source()], load_tokenizer(MODEL), samples=128, length=512, seed=0)
    assert windows.ids.shape == (128, 512)
