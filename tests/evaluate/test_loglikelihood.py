"""Log-likelihoods against transformers, one sequence at a time in float64. Field case C74."""

import math
from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny, save_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from cann_llm_quant.errors import CorpusError, NonFiniteResultError, UsageError
from cann_llm_quant.evaluate.loglikelihood import Encoder, Request, Scorer
from cann_llm_quant.runner.engine import LLMEngine

SLIDING = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}}


def requests(seed: int = 0, most: int = 40) -> list[Request]:
    """Questions with several choices, some of one token, behind a beginning that most of them share."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        count = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(3, 128, (count,), generator=generator).tolist())

    shared = ids(20, 21)
    asked = []
    for number in range(6):
        context = (shared if number < 4 else ()) + ids(1, most - 25)
        asked += [Request(context, ids(1, 6), f"question {number}") for _ in range(3)]
    asked += [Request(asked[0].context, (token,), "letter") for token in (5, 6, 7)]
    return [*asked, asked[1]]


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def literal(model: PreTrainedModel, request: Request, limit: int) -> tuple[float, bool]:
    """The sum of log-probabilities that transformers gives, alone and in full."""
    ids = (request.context + request.continuation)[-limit - 1 :]
    with torch.no_grad():
        log_p = model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)
    start = len(ids) - 1 - len(request.continuation)
    rows = log_p[start:]
    total = sum(float(rows[i, token]) for i, token in enumerate(request.continuation))
    return total, rows.argmax(-1).tolist() == list(request.continuation)


@pytest.mark.parametrize(
    ("family", "config"),
    [("llama", {}), ("qwen3", {}), ("qwen2", SLIDING), ("mixtral", {}), ("llama", DYNAMIC)],
    ids=["llama", "qwen3", "qwen2-sliding", "mixtral", "llama-dynamic"],
)
def test_scores_equal_transformers(tmp_path: Path, family: str, config: dict) -> None:
    limit = 32 if config is DYNAMIC else 256
    folder = save_tiny(tmp_path / family, family, dtype=torch.float32, **{"max_position_embeddings": limit} | config)
    engine, reference = LLMEngine(folder), load(folder)
    asked = [request for request in requests() if len(request.context) + len(request.continuation) <= limit]
    found = Scorer(engine.model, engine.max_context, 30).score(asked)
    for request, score in zip(asked, found, strict=True):
        # a model of its own for each: dynamic RoPE there remembers the longest text it saw
        model = load(folder) if config is DYNAMIC else reference
        logprob, greedy = literal(model, request, limit)
        assert score.logprob == pytest.approx(logprob, abs=2e-4)
        assert score.greedy == greedy


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LLMEngine:
    return LLMEngine(save_tiny(tmp_path_factory.mktemp("models") / "llama", dtype=torch.float32))


def test_scores_do_not_depend_on_batches_or_order(engine: LLMEngine) -> None:
    asked = requests(1)
    first = Scorer(engine.model, engine.max_context, 1).score(asked)
    for batch_tokens in (7, 64, 10_000):
        again = Scorer(engine.model, engine.max_context, batch_tokens).score(asked)
        assert [score.greedy for score in again] == [score.greedy for score in first]
        assert [score.logprob for score in again] == pytest.approx([score.logprob for score in first], abs=1e-4)
    backwards = Scorer(engine.model, engine.max_context, 64).score(asked[::-1])[::-1]
    assert [score.logprob for score in backwards] == pytest.approx([score.logprob for score in first], abs=1e-4)


def test_what_is_computed_is_what_was_announced(engine: LLMEngine) -> None:
    """Every distinct beginning is one token of work when all fits into one batch."""
    asked = requests(2)
    scorer = Scorer(engine.model, engine.max_context, 10_000)
    computed: list[int] = []
    scorer.score(asked, computed.append)
    inputs = {(request.context + request.continuation)[:-1] for request in asked}
    distinct = {ids[:end] for ids in inputs for end in range(1, len(ids) + 1)}
    assert sum(computed) == scorer.cost(asked) == len(distinct)


def test_too_long_contexts_are_cut_from_the_left(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "short", dtype=torch.float32, max_position_embeddings=16)
    short = LLMEngine(folder)
    long = Request(tuple(range(3, 40)), (50, 51, 52))
    fits = Request(long.context[-14:], long.continuation)
    scorer = Scorer(short.model, short.max_context)
    found, expected = scorer.score([long])[0], scorer.score([fits])[0]
    assert found == expected
    assert found.logprob == pytest.approx(literal(load(folder), long, 16)[0], abs=1e-4)
    with pytest.raises(UsageError, match=r"essay: a continuation of 17 tokens exceeds the model's 16 positions"):
        scorer.score([Request((3,), tuple(range(3, 20)), "essay")])


def test_greedy_means_every_token_is_the_likeliest(engine: LLMEngine) -> None:
    context = (9, 8, 7)
    written = engine.generate(context, 4, ignore_eos=True).token_ids
    other = (*written[:3], 3 if written[3] != 3 else 4)
    right, wrong = Scorer(engine.model, engine.max_context).score([Request(context, written), Request(context, other)])
    assert right.greedy
    assert not wrong.greedy


def test_c74_nan_names_the_question(tmp_path: Path) -> None:
    broken = LLMEngine(save_tiny(tmp_path / "broken", dtype=torch.float32))
    broken.model.layers[1].parameters["post_norm"][3] = math.nan
    with pytest.raises(NonFiniteResultError, match="question 7: the model's logits hold NaN"):
        Scorer(broken.model, broken.max_context).score([Request((3, 4), (5,), "question 7")])


def test_batches_of_less_than_a_token_are_refused(engine: LLMEngine) -> None:
    with pytest.raises(UsageError, match="--batch-tokens 0"):
        Scorer(engine.model, engine.max_context, 0)


def byte_pairs(*, bos: bool) -> PreTrainedTokenizerFast:
    """Bytes, and the pairs ' a', 'ab' merged; with or without BOS before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {letter: i for i, letter in enumerate(alphabet, 2)}
    vocab |= {"Ġa": len(vocab), "ab": len(vocab) + 1}
    inner = Tokenizer(models.BPE(vocab, [("Ġ", "a"), ("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>" if bos else None, eos_token="</s>")


def written(tokenizer: PreTrainedTokenizerFast, request: Request) -> tuple[list[str], list[str]]:
    return tokenizer.convert_ids_to_tokens(request.context), tokenizer.convert_ids_to_tokens(request.continuation)


@pytest.mark.parametrize(
    ("bos", "context", "continuation", "tokens"),
    [
        (True, "x", " a", (["<s>", "x"], ["Ġa"])),
        (True, "x ", "a", (["<s>", "x"], ["Ġa"])),  # the space belongs to the continuation
        (True, "x\n\n", "a", (["<s>", "x"], ["Ċ", "Ċ", "a"])),
        (False, "x", "a", (["x"], ["a"])),
        (False, "xa", "bb", (["x", "a"], ["b"])),  # "ab" is a token of the whole, in the context's count
        (True, "", "ab", (["<s>"], ["ab"])),
        (False, "", "ab", (["</s>"], ["ab"])),
        (True, "  ", "b", (["<s>"], ["Ġ", "Ġ", "b"])),
    ],
)
def test_pairs_are_split_as_the_harness_does(bos, context, continuation, tokens) -> None:
    tokenizer = byte_pairs(bos=bos)
    assert written(tokenizer, Encoder(tokenizer).request(context, continuation)) == tokens


def test_a_continuation_without_a_token_is_refused() -> None:
    with pytest.raises(CorpusError, match="row 3: the continuation 'b' adds no token"):
        Encoder(byte_pairs(bos=False)).request("xa", "b", "row 3")


def test_an_empty_context_needs_something_to_start_from(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(UsageError, match="BOS or EOS"):
        Encoder(tokenizer).request("", "w5")
