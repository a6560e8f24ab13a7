"""Evaluation against float64 twins, transformers, and the measuring protocol's arithmetic."""

import json
import math

import numpy as np
import pytest
import torch

from cann_llm_quant.errors import NonFiniteResultError, UsageError
from cann_llm_quant.evaluate import perplexity
from cann_llm_quant.evaluate.evaluation import evaluate
from cann_llm_quant.evaluate.report import EvaluationResult, Thresholds, compare
from cann_llm_quant.evaluate.windows import cut_windows

VOCAB = 37


def table_model(seed: int, temperature: float = 1.0):
    """Logits that depend on this token and the one before: a model with context, made of a table."""
    table = torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * temperature

    def logits(windows):
        for ids in windows:
            yield table[ids.roll(1), ids]

    return logits


def stream(length: int = 200) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(7)).tolist()


def float64_twin(logits, windows, reference=None):
    """The definitions, one position at a time, in NumPy float64."""

    def log_softmax(row):
        row = row.double().numpy()
        shifted = row - row.max()
        return shifted - np.log(np.exp(shifted).sum())

    nll, kl, agree = [], [], []
    rows = list(logits(windows.ids))
    others = list(reference(windows.ids)) if reference else rows
    for i, ids in enumerate(windows.ids.tolist()):
        for position in range(windows.first_scored(i), len(ids)):
            nll.append(-log_softmax(rows[i][position - 1])[ids[position]])
        for position in range(windows.overlap[i], len(ids)):
            p, q = log_softmax(others[i][position]), log_softmax(rows[i][position])
            kl.append((np.exp(p) * (p - q)).sum())
            agree.append(p.argmax() == q.argmax())
    return np.array(nll), np.array(kl), np.array(agree)


@pytest.mark.parametrize(("window", "stride"), [(16, 16), (16, 4), (50, 50), (200, 200)])
@pytest.mark.parametrize("bos_id", [None, 0])
def test_c72_matches_the_float64_definition(window, stride, bos_id, monkeypatch) -> None:
    monkeypatch.setattr(perplexity, "CHUNK_ELEMENTS", 5 * VOCAB)
    windows = cut_windows(stream(), window=window, stride=stride, bos_id=bos_id)
    q, p = table_model(1), table_model(2)
    result = evaluate(q, windows, reference=p)
    nll, kl, agree = float64_twin(q, windows, p)
    assert result.tokens == len(nll)
    assert result.nll_sum == pytest.approx(nll.sum(), rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(nll.mean()), rel=1e-6)
    measured = result.divergence
    assert measured is not None
    assert measured.positions == len(kl)
    assert measured.kl == pytest.approx(kl.mean(), rel=1e-5)
    assert measured.kl_max == pytest.approx(kl.max(), rel=1e-5)
    assert measured.kl_p99 == pytest.approx(np.sort(kl)[math.ceil(0.99 * len(kl)) - 1], rel=1e-5)
    assert measured.top1_agreement == agree.mean()
    reference_nll, _, _ = float64_twin(p, windows)
    assert measured.reference_perplexity == pytest.approx(math.exp(reference_nll.mean()), rel=1e-6)
    assert result.increase == pytest.approx(math.exp(nll.mean() - reference_nll.mean()) - 1, rel=1e-5)


def test_equals_the_measuring_protocols_arithmetic() -> None:
    """Disjoint windows without BOS: nll over N x (window - 1) tokens, KL and top-1 over all N x window positions."""
    ids = torch.tensor(stream(192)).view(-1, 64)
    q, p = table_model(3), table_model(4)
    nll = kl = agree = 0.0
    for window, a, b in zip(ids, p(ids), q(ids), strict=True):
        a, b = a.log_softmax(-1), b.log_softmax(-1)
        nll -= b[:-1].gather(1, window[1:, None]).sum().item()
        kl += (a.exp() * (a - b)).sum().item()
        agree += (a.argmax(-1) == b.argmax(-1)).sum().item()
    result = evaluate(q, cut_windows(stream(), window=64, max_windows=3), reference=p)
    assert result.tokens == 3 * 63
    assert result.perplexity == pytest.approx(math.exp(nll / (3 * 63)), rel=1e-6)
    assert result.divergence.kl == pytest.approx(kl / 192, rel=1e-5)
    assert result.divergence.top1_agreement == agree / 192


def test_equals_transformers_loss() -> None:
    """Issue: our number equals transformers' on the same windows to 1e-4 relative."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.5,
        )
    ).eval()
    windows = cut_windows(stream(), window=40)

    @torch.no_grad()
    def logits(ids):
        for row in ids:
            yield model(row[None]).logits[0]

    with torch.no_grad():
        losses = [model(row[None], labels=row[None]).loss.item() for row in windows.ids]
    assert evaluate(logits, windows).perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)


def test_a_model_against_itself_diverges_by_nothing() -> None:
    result = evaluate(table_model(5), cut_windows(stream(), window=50), reference=table_model(5))
    assert result.divergence.kl == pytest.approx(0.0, abs=1e-7)
    assert result.divergence.top1_agreement == 1.0
    assert result.increase == 0.0


def test_standard_error_over_windows() -> None:
    windows = cut_windows(stream(), window=50)
    q, p = table_model(1), table_model(2)
    _, kl, _ = float64_twin(q, windows, p)
    means = kl.reshape(4, 50).mean(1)
    result = evaluate(q, windows, reference=p)
    assert result.divergence.kl_stderr == pytest.approx(means.std(ddof=1) / 2.0, rel=1e-4)
    single = evaluate(q, cut_windows(stream(), window=50, max_windows=1), reference=p)
    assert single.divergence.kl_stderr is None


def test_c73_stride_one_with_bos_in_the_stream_has_a_standard_error() -> None:
    q, p = table_model(1), table_model(2)
    windows = cut_windows([1, *range(3, 30), 1, *range(3, 20)], window=8, stride=1, bos_id=1, bos="each-window")
    _, kl, _ = float64_twin(q, windows, p)
    cuts = np.cumsum([8 - overlap for overlap in windows.overlap])[:-1]
    means = np.array([part.mean() for part in np.split(kl, cuts)])
    result = evaluate(q, windows, reference=p)
    assert result.divergence.kl_stderr == pytest.approx(means.std(ddof=1) / math.sqrt(len(means)), rel=1e-4)
    assert result.divergence.positions == len(kl)


def test_c72_bits_per_byte_uses_the_texts_tokens_per_byte() -> None:
    windows = cut_windows(stream(100), window=50, text="x" * 400)
    result = evaluate(table_model(1), windows)
    expected = result.nll_sum / 98 / math.log(2) * 100 / 400
    assert result.bits_per_byte == pytest.approx(expected, rel=1e-12)
    assert evaluate(table_model(1), cut_windows(stream(100), window=50)).bits_per_byte is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("whose", ["candidate", "reference"])
def test_c74_nan_stops_with_its_position_and_exit_code_3(value, whose) -> None:
    def broken(windows):
        for index, row in enumerate(table_model(1)(windows)):
            if index == 2:
                row[17, 11] = value
            yield row

    windows = cut_windows(stream(), window=50)
    good = table_model(2)
    pair = (broken, good) if whose == "candidate" else (good, broken)
    with pytest.raises(NonFiniteResultError) as caught:
        evaluate(pair[0], windows, reference=pair[1])
    assert caught.value.exit_code == 3
    message = str(caught.value)
    assert whose in message
    assert "window 2, position 17" in message
    assert "token 117" in message
    assert "\n" not in message


def test_c74_nan_at_the_bos_is_not_called_token_minus_one() -> None:
    def broken(windows):
        for row in table_model(1)(windows):
            row[0, 3] = math.nan
            yield row

    with pytest.raises(NonFiniteResultError, match=r"window 0, position 0 \(the BOS before its text, "):
        evaluate(broken, cut_windows(range(3, 20), window=8, bos_id=1, bos="each-window"))


def test_c74_finite_logits_with_infinite_loss_are_caught() -> None:
    def extreme(windows):
        for ids in windows:
            row = torch.full((len(ids), VOCAB), -3e38)
            row[:, 36] = 3e38
            yield row

    with pytest.raises(NonFiniteResultError, match="window 0"):
        evaluate(extreme, cut_windows([1, 2, 3, 4], window=4))


def test_c74_overflowing_perplexity_is_no_result() -> None:
    def hopeless(windows):
        for ids in windows:
            row = torch.zeros(len(ids), VOCAB)
            row[:, 36] = 1e4
            yield row

    with pytest.raises(NonFiniteResultError, match="overflows"):
        evaluate(hopeless, cut_windows([1, 2, 3, 4], window=4))


def test_vocabularies_must_fit() -> None:
    with pytest.raises(UsageError, match="token id 99"):
        evaluate(lambda windows: iter([torch.zeros(4, VOCAB)]), cut_windows([1, 2, 99, 3], window=4))
    with pytest.raises(UsageError, match="one vocabulary"):
        evaluate(
            table_model(1),
            cut_windows([1, 2, 3, 4], window=4),
            reference=lambda windows: iter([torch.zeros(4, VOCAB + 1)]),
        )


def test_progress_counts_windows() -> None:
    seen: list[tuple[int, int]] = []
    evaluate(table_model(1), cut_windows(stream(), window=50), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_large_vocabulary_is_worked_through_in_chunks() -> None:
    """Half-precision logits of 256 x 150 000: a float32 copy of all rows would be 154 MB for each model."""
    seen: list[int] = []
    original = torch.Tensor.log_softmax

    def spy(self, dim):
        seen.append(self.numel())
        return original(self, dim)

    logits = torch.zeros(256, 150_000, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "log_softmax", spy)
        result = evaluate(lambda windows: iter([logits]), cut_windows(range(256), window=256))
    assert max(seen) <= 1 << 24
    assert result.perplexity == pytest.approx(150_000, rel=1e-5)


def missed(result: EvaluationResult, **thresholds: str | float) -> list[str]:
    return Thresholds.parse(**thresholds).missed(result)


def test_thresholds() -> None:
    result = evaluate(table_model(1), cut_windows(stream(), window=50), reference=table_model(2))
    assert missed(result) == []
    assert missed(result, max_increase="100000%", max_kl=1e3, min_top1=0.0) == []
    worse = evaluate(table_model(1, temperature=2.0), cut_windows(stream(), window=50), reference=table_model(2))
    assert worse.increase > 0.1
    assert missed(worse, max_increase=worse.increase + 1e-6) == []
    assert "--max-increase" in missed(worse, max_increase=f"{(worse.increase - 1e-6) * 100}%")[0]
    kl, top1 = result.divergence.kl, result.divergence.top1_agreement
    assert missed(result, max_kl=kl + 1e-9) == []
    assert "--max-kl" in missed(result, max_kl=kl - 1e-9)[0]
    assert missed(result, min_top1=top1) == []
    assert "--min-top1" in missed(result, min_top1=top1 + 1e-9)[0]


@pytest.mark.parametrize("option", ["max_increase", "max_kl", "min_top1"])
@pytest.mark.parametrize("value", ["one", "nan", "-1%", "", "inf"])
def test_bad_thresholds_are_usage_errors(option, value) -> None:
    with pytest.raises(UsageError, match="--" + option.replace("_", "-")):
        Thresholds.parse(**{option: value})


@pytest.mark.parametrize("value", ["200%", "1.01", 95])
def test_no_more_than_all_tokens_can_agree(value) -> None:
    with pytest.raises(UsageError, match=r"--min-top1 .* is more than 100%"):
        Thresholds.parse(min_top1=value)
    assert Thresholds.parse(min_top1="100%").min_top1 == 1.0
    assert Thresholds.parse(max_increase="200%").max_increase == 2.0


def test_a_threshold_needs_a_reference() -> None:
    result = evaluate(table_model(1), cut_windows(stream(), window=50))
    with pytest.raises(UsageError, match="--reference"):
        missed(result, max_kl=0.1)


def test_c72_compare_refuses_different_settings() -> None:
    a = evaluate(table_model(1), cut_windows(stream(), window=50))
    b = evaluate(table_model(2), cut_windows(stream(), window=50))
    comparison = compare(a, b)
    assert comparison.increase == pytest.approx(b.perplexity / a.perplexity - 1)
    for options in ({"window": 40}, {"window": 50, "stride": 25}, {"window": 50, "bos_id": 3}):
        other = evaluate(table_model(1), cut_windows(stream(), **options))
        with pytest.raises(UsageError, match="differ"):
            compare(a, other)
    with pytest.raises(UsageError, match="tokens_sha256"):
        compare(a, evaluate(table_model(1), cut_windows(stream()[::-1], window=50)))


def test_the_result_is_plain_json() -> None:
    result = evaluate(table_model(1), cut_windows(stream(), window=50, text="abc"), reference=table_model(2))
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert document["settings"]["window"] == 50
    assert document["settings"]["bos"] == "none"
    assert document["divergence"]["kl"] == result.divergence.kl
    assert document["perplexity"] == result.perplexity
