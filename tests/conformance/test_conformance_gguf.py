"""llama.cpp computes what we compute from the GGUF files that we write, and cuts text as the model's tokenizer does.

llama.cpp rounds the inputs of quantized linears to 8 bits in blocks of 32, which alone moves log-probabilities of these
random models by a tenth. So each model is compared twice: its dequantized weights in F32, where names, row orders,
rotary settings and biases must agree to the last digits, and its codes, where the distributions must be close. That
llama.cpp reads each type of block as we do is shown by embeddings, whose rows it dequantizes without rounding.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_exports import TEXT, packed_model, save_byte_level, save_pieces
from native_folders import save_native
from tiny_models import save_tiny

pytest.importorskip("xllamacpp")

from llama_cpp import LlamaCpp

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.checkpoint.companion_tokenizer import tokenizer_of
from cann_llm_quant.export.gguf_export import export_gguf
from cann_llm_quant.export.native_reader import open_native
from cann_llm_quant.quant.rtn import solve
from cann_llm_quant.quant.scheme import MXFP4, QuantizedTensor, Scheme
from cann_llm_quant.runner.engine import LLMEngine

VOCAB = 419
PRINTABLE = 36  # "A" in the tokenizers made here
IDS = [5, 77, 123, 300, 12, 9, 200, 44, 55, 66, 150, 160, 301, 7, 8, 250, 91, 18, 33, 34]
LENGTHS = (1, 7, 20)
TYPES = {
    "Q4_0": Scheme("int4", True, "group", 32),
    "Q4_1": Scheme("int4", False, "group", 32),
    "Q5_0": Scheme("int5", True, "group", 32),
    "Q5_1": Scheme("int5", False, "group", 32),
    "Q8_0": Scheme("int8", True, "channel", None),
}
ODD = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-bias-gqa-odd-sizes": ("llama", "Q4_0", ODD | {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", "Q4_1", {"tie_word_embeddings": True}),
    "llama-llama3": ("llama", "Q5_0", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", "Q5_1", {"rope_parameters": YARN}),
    "qwen2": ("qwen2", "Q8_0", {}),
    "qwen3-linear": ("qwen3", "Q8_0", {"head_dim": 32, "rope_parameters": LINEAR}),
    "mixtral": ("mixtral", "Q4_0", {"num_local_experts": 4}),
    "qwen2-moe": ("qwen2_moe", "Q8_0", {}),
    "qwen2-moe-tied": ("qwen2_moe", "Q4_1", {"tie_word_embeddings": True}),
    "qwen3-moe": ("qwen3_moe", "Q4_0", {"norm_topk_prob": True}),
}


def ours(folder: Path, ids: list[int] = IDS) -> torch.Tensor:
    """Float64 log-probabilities [positions, vocab] of our runner."""
    with LLMEngine(folder) as engine:
        (logits,) = engine.logits(torch.tensor([ids]))
    return torch.log_softmax(logits.double().view(len(ids), -1), dim=-1)


def make(folder: Path, family: str, kind: str, config: dict[str, Any]) -> Path:
    source = save_tiny(folder / "float", family, vocab_size=VOCAB, **config)
    save_byte_level(source)
    return save_native(source, folder / "native", TYPES[kind])


def theirs(file: Path) -> list[torch.Tensor]:
    runtime = LlamaCpp(file)
    return [runtime.next_token(IDS[:length], VOCAB, PRINTABLE) for length in LENGTHS]


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities(tmp_path: Path, name: str, record_property):
    family, kind, config = MODELS[name]
    native = make(tmp_path, family, kind, config)
    expected = ours(native)
    with open_native(native) as checkpoint:
        model = packed_model(checkpoint)
        coded = export_gguf(checkpoint, model, tmp_path / "coded", float_type="F32")
        plain = export_gguf(checkpoint, replace(model, schemes={}), tmp_path / "plain", float_type="F32")
    assert coded.file.name == f"model-{kind}.gguf"
    pairs = zip(LENGTHS, theirs(plain.file), theirs(coded.file), strict=True)
    differences = [((expected[n - 1] - f).abs().max(), (expected[n - 1] - q).abs().max()) for n, f, q in pairs]
    floats, codes = (max(float(d) for d in column) for column in zip(*differences, strict=True))
    for target, difference in (("gguf F32", floats), (f"gguf {kind}", codes)):
        row = {"target": target, "model": name, "consumer": "llama.cpp", "difference": difference}
        record_property("conformance", row | {"of": "log-probabilities"})
    assert floats < 2e-5
    assert codes < 0.5


class WithTable:
    """A float checkpoint whose embedding is in codes."""

    def __init__(self, inner, weight: QuantizedTensor) -> None:
        self.inner, self.weight = inner, weight

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def quantized(self, module: str) -> QuantizedTensor:
        assert module == "model.embed_tokens"
        return self.weight


@pytest.mark.parametrize("kind", [*TYPES, "MXFP4"])
def test_llama_cpp_reads_each_type_of_block_as_we_do(tmp_path: Path, kind: str):
    source = save_tiny(tmp_path / "float", vocab_size=VOCAB, dtype=torch.float32)
    save_byte_level(source)
    scheme = (TYPES | {"MXFP4": MXFP4})[kind]
    with open_checkpoint(str(source)) as checkpoint:
        table = solve(checkpoint.load("model.embed_tokens.weight"), scheme, torch.float16)
        model = packed_model(checkpoint, torch.float32)
        shapes = {"model.embed_tokens": table.shape}
        coded = replace(model, schemes={"model.embed_tokens": scheme}, shapes=shapes)
        written = export_gguf(WithTable(checkpoint, table), coded, tmp_path / "coded", tokenizer=True)
    expected = ours(written.path)
    for length, found in zip(LENGTHS, theirs(written.file), strict=True):
        assert (expected[length - 1] - found).abs().max() < (2e-5 if scheme.symmetric else 2e-2)


TEXTS = [
    *TEXT,
    "It's 1234567 tests:  \n\n   THEY'LL pass,won't they?\t\tYes!!! (100.5%) — “quoted” …",
    "<|im_start|>user\nHello<|im_end|>\n",
    "naïve café 日本語テスト 한국어 🙂🙂 Ελληνικά русский текст",
    " leading and trailing ",
    "a\r\nb\n\n\nc   d",
]


@pytest.mark.parametrize("split", ["qwen2", "llama-bpe", "chatglm-bpe", "gpt-2", "smollm"])
def test_byte_level_ids(tmp_path: Path, split: str):
    source = save_tiny(tmp_path / "float", vocab_size=VOCAB, num_hidden_layers=1)
    save_byte_level(source, split=split, whole_words=split == "llama-bpe")
    _compare_ids(source, tmp_path / "out")


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_of_pieces(tmp_path: Path, prefix: bool):
    source = save_pieces(save_tiny(tmp_path / "float", vocab_size=VOCAB, num_hidden_layers=1), prefix=prefix)
    _compare_ids(source, tmp_path / "out")


@pytest.mark.shared
@pytest.mark.parametrize("name", ["models/stories260k", "tokenizers/tiny2048"])
def test_ids_of_trained_tokenizers(tmp_path: Path, shared: Path, name: str):
    source = save_tiny(tmp_path / "float", vocab_size=2048, num_hidden_layers=1)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (source / file).write_bytes((shared / "data" / name / file).read_bytes())
    stories = (shared / "data/text/tinystories_sample.txt").read_text(encoding="utf-8")
    _compare_ids(source, tmp_path / "out", [stories[n : n + 500] for n in range(0, 40000, 500)])


def _compare_ids(source: Path, out: Path, texts: list[str] = TEXTS) -> None:
    with open_checkpoint(str(source)) as checkpoint:
        written = export_gguf(checkpoint, packed_model(checkpoint), out)
        tokenizer = tokenizer_of(checkpoint)
    runtime = LlamaCpp(written.file)
    for text in texts:
        assert runtime.tokenize(text) == tokenizer.encode(text), text
