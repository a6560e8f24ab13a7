"""The engine against transformers: the same tokens, the same logits; streaming, stopping and refusals."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_folders import dequantized_copy, save_native
from runner_tokenizers import byte_level, sentencepiece_like
from tiny_models import save_tiny
from transformers import AutoModelForCausalLM

from cann_llm_quant.errors import CheckpointError, InputError, RequestError, UsageError
from cann_llm_quant.evaluate.evaluation import evaluate
from cann_llm_quant.evaluate.windows import cut_windows
from cann_llm_quant.models.decoder import DenseLinear
from cann_llm_quant.quant.scheme import Scheme
from cann_llm_quant.runner.engine import Generation, LLMEngine
from cann_llm_quant.runner.kernels.dequantize import DequantizeLinear
from cann_llm_quant.runner.kernels.torch_int4 import Int4Linear

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
PROMPT = [5, 9, 77, 31, 6]
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


def transformers_greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids = torch.tensor([prompt])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return made[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"), dtype=torch.float32)


@pytest.fixture(scope="module")
def engine(folder) -> LLMEngine:
    return LLMEngine(folder)


@pytest.fixture(scope="module")
def byte_engine(tmp_path_factory) -> LLMEngine:
    """A random model that speaks byte-level tokens, of any bytes at all."""
    folder = save_tiny(tmp_path_factory.mktemp("bytes"), dtype=torch.float32, vocab_size=320, num_hidden_layers=1)
    tokenizer = byte_level()
    (folder / "tokenizer.json").unlink()
    tokenizer.save_pretrained(folder)
    return LLMEngine(folder)


@pytest.mark.parametrize(("family", "config"), [("llama", {}), ("qwen2", {}), ("qwen2", WINDOW), ("qwen3", {})])
@pytest.mark.parametrize("prompt", [PROMPT, [7], list(range(3, 43))])
def test_greedy_equals_transformers_token_for_token(family, config, prompt, tmp_path) -> None:
    """Also a prompt of one token, a prompt cut into chunks, and text past a sliding window."""
    folder = save_tiny(tmp_path, family, dtype=torch.float32, **config)
    generation = LLMEngine(folder, max_batch_tokens=16).generate(prompt, 30, ignore_eos=True)
    assert list(generation.token_ids) == transformers_greedy(folder, prompt, 30)
    assert generation.finish_reason == "length"
    assert generation.prompt_tokens == len(prompt)


def test_cached_logits_equal_those_of_the_whole(engine) -> None:
    generation = engine.generate(PROMPT, 20, ignore_eos=True)
    ids = torch.tensor([[*PROMPT, *generation.token_ids]])
    (whole,) = engine.logits(ids)
    assert whole.argmax(-1)[len(PROMPT) - 1 : -1].tolist() == list(generation.token_ids)


def test_logits_serve_evaluation(engine, folder) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    windows = cut_windows(torch.randint(3, 128, (96,), generator=torch.Generator().manual_seed(1)), window=32)

    @torch.no_grad()
    def theirs(ids):
        for row in ids:
            yield model(row[None]).logits[0]

    result = evaluate(engine.logits, windows, reference=theirs)
    assert result.perplexity == pytest.approx(result.divergence.reference_perplexity, rel=1e-5)
    assert abs(result.divergence.kl) < 1e-6
    assert result.divergence.top1_agreement == 1.0


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "top_p": 0.9, "top_k": 40}]
)
def test_the_same_request_gives_the_same_text(engine, options) -> None:
    first, second = (engine.generate(PROMPT, 25, **options) for _ in range(2))
    assert (first.text, first.token_ids, first.finish_reason) == (second.text, second.token_ids, second.finish_reason)


def test_another_seed_gives_another_text(engine) -> None:
    one, other = (engine.generate(PROMPT, 25, temperature=1.0, seed=seed).token_ids for seed in (1, 2))
    assert one != other


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    stop=st.lists(st.text("abcdehnt .\n", min_size=1, max_size=2), max_size=3),
    include=st.booleans(),
)
def test_streamed_text_equals_generated_text_and_ends_at_stops(byte_engine, seed, stop, include) -> None:
    options = {"temperature": 1.0, "seed": seed, "stop": tuple(stop), "include_stop": include}
    chunks = list(byte_engine.stream("the thin ", 24, **options))
    generation = byte_engine.generate("the thin ", 24, **options)
    assert "".join(chunk.text for chunk in chunks) == generation.text
    assert tuple(chunk.token_id for chunk in chunks) == generation.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    whole = byte_engine.tokenizer.decode(list(generation.token_ids), skip_special_tokens=True)
    if not include:
        assert all(text not in generation.text for text in stop)
    assert whole.startswith(generation.text)
    if generation.finish_reason == "length":
        assert whole == generation.text


def test_c71_stop_texts_end_the_text_before_themselves(byte_engine) -> None:
    free = byte_engine.generate("the ", 60, ignore_eos=True, temperature=1.0, seed=1)
    middle = free.text[10:12]
    stopped = byte_engine.generate("the ", 60, ignore_eos=True, temperature=1.0, seed=1, stop=(middle,))
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.index(middle)]
    assert len(stopped.token_ids) < 60
    shown = byte_engine.generate(
        "the ", 60, ignore_eos=True, temperature=1.0, seed=1, stop=(middle,), include_stop=True
    )
    assert shown.text == stopped.text + middle


def with_end(engine: LLMEngine, *ids: int) -> LLMEngine:
    return LLMEngine.from_parts(engine.model, engine.tokenizer, end_ids=frozenset(ids))


def test_c69_an_end_token_stops_and_is_not_printed(engine) -> None:
    free = engine.generate(PROMPT, 20, ignore_eos=True)
    end = free.token_ids[6]
    position = free.token_ids.index(end)
    stopped = with_end(engine, 2, end).generate(PROMPT, 20)
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: position + 1]
    assert f"w{end}" not in stopped.text.split()
    assert with_end(engine, 2, end).generate(PROMPT, 20, ignore_eos=True).token_ids == free.token_ids


def test_c69_end_ids_come_from_every_file(folder, tmp_path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    (copy / "config.json").write_text(json.dumps(config | {"eos_token_id": 5}), encoding="utf-8")
    (copy / "generation_config.json").write_text('{"eos_token_id": [2, 5, 7]}', encoding="utf-8")
    assert LLMEngine(copy).end_ids == {2, 5, 7}
    (copy / "generation_config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(CheckpointError, match="generation_config"):
        LLMEngine(copy)
    (copy / "generation_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="generation_config"):
        LLMEngine(copy)


@pytest.mark.parametrize(("include", "text"), [(False, ""), (True, "</s>")])
def test_c71_a_stop_text_that_is_a_special_token(engine, include, text) -> None:
    """Special tokens have no text when decoded, so their name as a stop text works through their id."""
    ignoring = with_end(engine)
    free = ignoring.generate(PROMPT, 1)
    (first,) = free.token_ids
    biased = DenseLinear(torch.zeros(128, 64), torch.zeros(128).index_fill(0, torch.tensor([2]), 1.0))
    ignoring.model.head_op, head = biased, ignoring.model.head_op
    try:
        stopped = ignoring.generate(PROMPT, 5, stop=("</s>",), include_stop=include)
    finally:
        ignoring.model.head_op = head
    assert first != 2
    assert stopped.token_ids == (2,)
    assert (stopped.finish_reason, stopped.text) == ("stop", text)


def test_sentencepiece_text_continues_the_prompt(tmp_path) -> None:
    folder = save_tiny(tmp_path, dtype=torch.float32, vocab_size=267)
    (folder / "tokenizer.json").unlink()
    tokenizer = sentencepiece_like()
    tokenizer.save_pretrained(folder)
    engine = LLMEngine(folder)
    word = tokenizer.convert_tokens_to_ids("▁ab")
    engine.model.head_op = DenseLinear(torch.zeros(267, 64), torch.zeros(267).index_fill(0, torch.tensor([word]), 1.0))
    assert engine.prompt_ids("ab")[0] == tokenizer.bos_token_id
    assert engine.generate("ab", 2).text == " ab ab"
    assert engine.generate([], 2).text == "ab ab"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([-1], "-1 at position 0"), ([3, 128], "128 at position 1"), ([3, True], "position 1"), ([3] * 255, "context")],
)
def test_c70_impossible_prompts_are_refused_before_any_work(engine, prompt, message) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        engine.stream(prompt, 5)
    assert caught.value.field in {"prompt", "max_new_tokens"}


@pytest.mark.parametrize("settings", [{"stop_ids": (999,)}, {"logit_bias": {128: 1.0}}])
def test_c70_ids_are_checked_against_the_model_not_the_tokenizer(engine, settings) -> None:
    """The tiny tokenizer has fewer tokens than the embedding has rows; 127 is a row."""
    (field,) = settings
    with pytest.raises(RequestError, match="from 0 to 127") as caught:
        engine.stream(PROMPT, 5, **settings)
    assert caught.value.field == field


def test_stop_ids_end_the_text_even_where_end_tokens_are_ignored(engine) -> None:
    free = engine.generate(PROMPT, 20, ignore_eos=True)
    end = free.token_ids[6]
    stopped = engine.generate(PROMPT, 20, ignore_eos=True, stop_ids=(end,))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(end) + 1]


def test_c70_an_empty_prompt_is_bos_or_refused(engine, byte_engine) -> None:
    assert engine.prompt_ids([]) == [1]
    assert engine.generate("", 3, ignore_eos=True).prompt_tokens == 1
    tokenizer = byte_level()
    tokenizer.bos_token = None
    with pytest.raises(UsageError, match="prompt is empty"):
        LLMEngine.from_parts(byte_engine.model, tokenizer).generate("", 3)


def test_context_limits(engine, folder) -> None:
    exact = engine.generate([3] * 250, 6, ignore_eos=True)
    assert len(exact.token_ids) == 6
    with pytest.raises(UsageError, match="7 new ones exceed the context of 256"):
        engine.generate([3] * 250, 7)
    small = LLMEngine(folder, max_context=10)
    with pytest.raises(UsageError, match="context of 10"):
        small.generate(PROMPT, 6)
    with pytest.raises(UsageError, match="window of 11"):
        small.logits(torch.zeros(1, 11, dtype=torch.int64))
    for limit in (0, 257):
        with pytest.raises(UsageError, match=f"max_context {limit}"):
            LLMEngine(folder, max_context=limit)


def test_bad_options_are_refused(engine, folder, tmp_path) -> None:
    with pytest.raises(UsageError, match="temprature"):
        engine.generate(PROMPT, 5, temprature=1.0)
    with pytest.raises(UsageError, match="top_p"):
        engine.stream(PROMPT, 5, top_p=0.0)
    with pytest.raises(UsageError, match="dtype"):
        LLMEngine(folder, dtype="fp64")
    with pytest.raises(InputError):
        LLMEngine(tmp_path / "absent")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_a_packed_model_computes_what_its_dequantized_weights_do(family, bits, symmetric, tmp_path) -> None:
    """Packed linears against the weights that compressed-tensors dequantizes from the same files."""
    sizes = {"num_hidden_layers": 2} | (MOE if family == "qwen2_moe" else {})
    folder = save_tiny(tmp_path / "float", family, **sizes)
    packed = save_native(folder, tmp_path / "packed", Scheme(f"int{bits}", symmetric, "group", 32))
    engine = LLMEngine(packed)
    assert DequantizeLinear in {type(op) for layer in engine.model.layers for op in layer.linears.values()}
    reference = LLMEngine(dequantized_copy(packed, folder, tmp_path / "dequantized"))
    ids = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(3))
    for ours, expected in zip(engine.logits(ids), reference.logits(ids), strict=True):
        assert float((ours - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    answers = [each.generate(PROMPT, 20, ignore_eos=True).token_ids for each in (engine, reference)]
    assert answers[0] == answers[1]


def test_greedy_from_packed_weights_equals_transformers(tmp_path) -> None:
    """transformers reads the same packed directory."""
    folder = save_tiny(tmp_path / "float", dtype=torch.float32)
    packed = save_native(folder, tmp_path / "packed", Scheme("int4", True, "group", 32))
    generation = LLMEngine(packed).generate(PROMPT, 20, ignore_eos=True)
    assert list(generation.token_ids) == transformers_greedy(packed, PROMPT, 20)


def test_bfloat16_runs_on_the_packed_operators(tmp_path) -> None:
    folder = save_tiny(tmp_path / "float", num_hidden_layers=1)
    packed = save_native(folder, tmp_path / "packed", Scheme("int4", True, "group", 32))
    fast, reference = (LLMEngine(packed, dtype="bf16", kernel=kernel) for kernel in ("auto", "reference"))
    assert all(isinstance(op, Int4Linear) for op in fast.model.layers[0].linears.values())
    assert all(isinstance(op, DequantizeLinear) for op in reference.model.layers[0].linears.values())
    ids = torch.randint(3, 128, (1, 16), generator=torch.Generator().manual_seed(3))
    (a,), (b,) = fast.logits(ids), reference.logits(ids)
    assert a.dtype == torch.bfloat16
    assert float((a.float() - b.float()).abs().max()) < 0.06 * float(b.float().abs().max())


def test_generation_reports_its_time(engine) -> None:
    generation = engine.generate(PROMPT, 4, ignore_eos=True)
    assert isinstance(generation, Generation)
    assert generation.timings.prefill_seconds > 0
    assert generation.timings.decode_seconds > 0


@pytest.mark.shared
@pytest.mark.parametrize("name", ["stories260k", "s260k-qwen2", "tiny-llama"])
def test_trained_models_continue_a_story_as_transformers_does(shared, name) -> None:
    folder = shared / "data" / "models" / name
    engine = LLMEngine(folder)
    prompt = "Once upon a time, there was a"
    ids = engine.prompt_ids(prompt)
    generation = engine.generate(prompt, 40, ignore_eos=True)
    assert list(generation.token_ids) == transformers_greedy(folder, ids, 40)
    whole = engine.tokenizer.decode([*ids, *generation.token_ids], skip_special_tokens=True)
    assert prompt + generation.text == whole


@pytest.mark.shared
def test_perplexity_of_a_trained_model_equals_transformers(shared) -> None:
    folder = shared / "data" / "models" / "stories260k"
    engine = LLMEngine(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = (shared / "data" / "text" / "stories_generated.txt").read_text(encoding="utf-8")[:8000]
    windows = cut_windows(engine.tokenizer.encode(text, add_special_tokens=False), window=256, max_windows=4)
    with torch.no_grad():
        losses = [model(row[None], labels=row[None]).loss.item() for row in windows.ids]
    expected = math.exp(sum(losses) / len(losses))
    assert evaluate(engine.logits, windows).perplexity == pytest.approx(expected, rel=1e-4)
