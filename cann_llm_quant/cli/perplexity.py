"""`perplexity`: how well a model predicts a text and, with `--reference`, how far it is from another model."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cann_llm_quant.cli import kv_run_flags as kv
from cann_llm_quant.cli.kv_run_flags import kv_choice
from cann_llm_quant.cli.models import OpenModel, open_model
from cann_llm_quant.cli.options import (
    ActivationBudget,
    AllowPickle,
    Debug,
    Device,
    Dtype,
    Json,
    Model,
    Reference,
    ReferenceRevision,
    Revision,
    parse_size,
)
from cann_llm_quant.cli.progress import Step, show_progress
from cann_llm_quant.cli.terminal import Reply, print_facts
from cann_llm_quant.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from cann_llm_quant.evaluate.perplexity import Logits
    from cann_llm_quant.evaluate.report import EvaluationResult
    from cann_llm_quant.evaluate.windows import EvaluationWindows
    from cann_llm_quant.models.attention import Attend
    from cann_llm_quant.runner.kv_policy import KvChoice

DEFAULT_WINDOW = 1024
THRESHOLDS = "Thresholds (exit code 1 when missed)"


@dataclass(frozen=True)
class TextRules:
    """Which text is scored, and how it is cut; `data` None is the held-out text inside the package."""

    data: str | None
    window: int | None
    stride: int | None
    max_windows: int | None
    bos: Literal["auto", "each-window", "none"]


@dataclass(frozen=True)
class Compute:
    """Where and how the layers run."""

    device: str
    dtype: str
    budget: int


@dataclass(frozen=True)
class Cache:
    """The KV cache that the model is measured with; `page_size` None is the files'."""

    choice: "KvChoice"
    page_size: int | None = None
    pattern: str = "dense"


def perplexity(
    model: Model,
    reference: Reference = None,
    reference_revision: ReferenceRevision = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="SOURCE", help="Text to score. [default: held-out text inside the package]"),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option("--window", metavar="N", help="Tokens in a window. [default: 1024, or the model's limit]"),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option("--stride", metavar="N", help="Tokens between windows. [default: the window: disjoint]"),
    ] = None,
    max_windows: Annotated[
        int | None, typer.Option("--max-windows", metavar="N", help="Score the first N windows only. [default: all]")
    ] = None,
    bos: Annotated[
        Literal["auto", "each-window", "none"],
        typer.Option("--bos", help="BOS before every window; auto follows the tokenizer's own rule."),
    ] = "auto",
    max_increase: Annotated[
        str | None,
        typer.Option("--max-increase", metavar="SHARE", help="Of perplexity, such as 1%.", rich_help_panel=THRESHOLDS),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option("--max-kl", metavar="NATS", help="KL divergence per token.", rich_help_panel=THRESHOLDS),
    ] = None,
    min_top1: Annotated[
        str | None,
        typer.Option(
            "--min-top1", metavar="SHARE", help="Same most likely token, such as 95%.", rich_help_panel=THRESHOLDS
        ),
    ] = None,
    kv_cache: kv.RunKvCache = None,
    kv_sink_tokens: kv.RunKvSinkTokens = None,
    kv_recent_tokens: kv.RunKvRecentTokens = None,
    kv_sensitive: kv.RunKvSensitive = None,
    page_size: kv.RunPageSize = None,
    attention_pattern: kv.AttentionPattern = "dense",
    activation_budget: ActivationBudget = "2GiB",
    device: Device = "cpu",
    dtype: Dtype = "fp32",
    revision: Revision = None,
    allow_pickle: AllowPickle = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Measure how well a model predicts a text.

    With a reference also KL divergence and top-1 agreement. One layer is in memory at a time. Keys and values go
    through the engine's cache, in the formats that the model's files or --kv-cache say; the reference's stay in float.
    """
    if reference is None and (max_increase, max_kl, min_top1) != (None, None, None):
        raise UsageError("thresholds compare with a reference model; add --reference MODEL")
    if reference is None and reference_revision is not None:
        raise UsageError("--reference-revision is of a reference model; add --reference MODEL")
    rules = TextRules(data, window, stride, max_windows, bos)
    compute = Compute(device, dtype, parse_size(activation_budget))
    from cann_llm_quant.evaluate.report import Thresholds

    cache = Cache(kv_choice(kv_cache, kv_sink_tokens, kv_recent_tokens, kv_sensitive), page_size, attention_pattern)
    thresholds = Thresholds.parse(max_increase=max_increase, max_kl=max_kl, min_top1=min_top1)
    with ExitStack() as stack:
        models = [open_model(model, revision=revision, allow_pickle=allow_pickle)]
        stack.enter_context(models[0].checkpoint)
        if reference is not None:
            models.append(open_model(reference, revision=reference_revision, allow_pickle=allow_pickle))
            stack.enter_context(models[1].checkpoint)
        result, cached = measure(models, rules, compute, cache)
    missed = thresholds.missed(result)
    value = {"model": model, "reference": reference, "text": data or "default", "dtype": dtype, **result.to_json()}
    value |= {"kv_cache": cached}
    value |= {"missed": missed, "exit_code": 1} if missed else {}
    reply = Reply(json)
    reply.result(value, lambda console: draw(console, value, result), status="failed" if missed else "ok")
    for sentence in missed:
        reply.note(f"error: {sentence}")
    return 1 if missed else 0


def measure(
    models: list[OpenModel], rules: TextRules, compute: Compute, cache: Cache | None = None
) -> "tuple[EvaluationResult, dict[str, Any] | None]":
    """Evaluate the first model, beside the second if there is one, on the same windows.

    Returns the result and what the first model's cache was, None where nothing of it is quantized or left out.
    """
    from cann_llm_quant.evaluate.evaluation import evaluate

    windows = cut_text(models, rules)
    passes = [model.arch.num_layers * len(windows.ids) for model in models]
    with show_progress("passes") as progress:

        def step(stage: str, before: int) -> Callable[[int, int], None]:
            return lambda done, total: progress(Step(stage, before + done, sum(passes)))

        attend, cached = (None, None) if cache is None else cached_attention(models[0], cache)
        candidate = streamed(models[0], compute, step("evaluate", 0), attend)
        reference = streamed(models[1], compute, step("reference", passes[0])) if len(models) > 1 else None
        return evaluate(candidate, windows, reference=reference), cached


def cut_text(models: list[OpenModel], rules: TextRules) -> "EvaluationWindows":
    """The text as windows of the candidate's tokens.

    Raises UsageError for windows longer than a model's positions and for models of different vocabularies.
    """
    from cann_llm_quant.corpus import default_evaluation_source, load_text, parse_source
    from cann_llm_quant.evaluate.windows import cut_windows, own_bos
    from cann_llm_quant.tokenizer import encode

    sizes = [model.arch.vocab_size for model in models]
    if len(set(sizes)) > 1:
        raise UsageError(
            f"the model's vocabulary has {sizes[0]} entries and the reference's {sizes[1]}; they do not compare"
        )
    limit = min(model.arch.max_positions for model in models)
    window = min(DEFAULT_WINDOW, limit) if rules.window is None else rules.window
    if window > limit:
        raise UsageError(f"--window {window} exceeds the model's {limit} positions; use --window {limit} or less")
    tokenizer = models[0].tokenizer()
    source = default_evaluation_source() if rules.data is None else parse_source(rules.data)
    text = load_text(source, tokenizer).text
    return cut_windows(
        encode(tokenizer, text, bos=False),
        window=window,
        stride=rules.stride,
        max_windows=rules.max_windows,
        bos_id=own_bos(tokenizer, rules.bos),
        bos=rules.bos,
        text=text,
    )


def cached_attention(
    model: OpenModel, cache: Cache
) -> "tuple[Callable[[Tensor], Attend] | None, dict[str, Any] | None]":
    """What makes the attention of the windows go through the cache, and what the cache is, in plain values."""
    from functools import partial

    from cann_llm_quant.runner.cached_windows import CachedWindows
    from cann_llm_quant.runner.kv_policy import resolve_plan, stored_page_size
    from cann_llm_quant.runner.pattern import parse_pattern

    plan = resolve_plan(model.checkpoint, cache.choice, model.arch.num_layers)
    pattern = parse_pattern(cache.pattern)
    if not plan.quantizes and pattern is None:
        return None, None
    page_size = cache.page_size or stored_page_size(model.checkpoint)
    described = {
        "layers": plan.labels(),
        "bits_per_value": plan.bits_per_value(page_size, model.arch.num_kv_heads, model.arch.head_dim),
        "sink_tokens": plan.sink_tokens,
        "recent_tokens": plan.recent_tokens,
        "sensitive_ids": len(plan.sensitive),
        "page_size": page_size,
        "attention_pattern": cache.pattern,
    }
    return partial(CachedWindows, plan, page_size=page_size, pattern=pattern), described


def streamed(
    model: OpenModel,
    compute: Compute,
    progress: Callable[[int, int], None],
    attend: "Callable[[Tensor], Attend] | None" = None,
) -> "Logits":
    """The model's logits, computed with one layer in memory at a time."""
    from cann_llm_quant.calibrate.streamed_logits import StreamedLogits
    from cann_llm_quant.device import resolve_device, resolve_dtype

    return StreamedLogits(
        model.checkpoint,
        model.arch,
        device=resolve_device(compute.device),
        dtype=resolve_dtype(compute.dtype),
        budget=compute.budget,
        progress=progress,
        attend=attend,
    )


def draw(console: "Console", value: dict[str, Any], result: "EvaluationResult") -> None:
    """The result for people."""
    console.print(f"perplexity {result.perplexity:.4f}", style="bold")
    print_facts(console, facts(value, result))


def facts(value: dict[str, Any], result: "EvaluationResult") -> Iterable[tuple[str, str]]:
    """Title and text of the lines below the perplexity: comparison first, then the rules it was measured under."""
    measured = result.divergence
    if measured is not None and result.increase is not None:
        yield "reference", f"perplexity {measured.reference_perplexity:.4f}, so an increase of {result.increase:+.2%}"
        error = "" if measured.kl_stderr is None else f" ± {measured.kl_stderr:.2g}"
        yield "KL divergence", f"{measured.kl:.5f}{error} nats per token (99th percentile {measured.kl_p99:.3g})"
        yield "top-1", f"{measured.top1_agreement:.2%} of tokens have the same most likely successor"
    if value["kv_cache"] is not None:
        yield "KV cache", kv_line(value["kv_cache"])
    rules = result.settings
    cut = "disjoint" if rules.stride == rules.window else f"stride {rules.stride}"
    bos = "BOS before each" if rules.bos == "each-window" else "no BOS"
    yield "windows", f"{rules.windows} of {rules.window} tokens, {cut}, {bos}; {result.tokens} tokens scored"
    if result.bits_per_byte is not None:
        yield "bits per byte", f"{result.bits_per_byte:.4f}"
    yield "text", f"{value['text']}, sha256 {(rules.text_sha256 or '')[:12]}"


def kv_line(cache: dict[str, Any]) -> str:
    """The cache in one line: formats and the layers that have them, their size, and what stays in float."""
    parts = []
    for label, group in groupby(enumerate(cache["layers"]), key=lambda pair: pair[1]):
        numbers = [number for number, _ in group]
        whole = len(numbers) == len(cache["layers"])
        parts.append(label if whole else f"{label} in layers {numbers[0]}-{numbers[-1]}")
    text = f"{'; '.join(parts)}; {cache['bits_per_value']:.2f} bits a value in pages of {cache['page_size']}"
    kept = [("first", cache["sink_tokens"]), ("latest", cache["recent_tokens"])]
    floats = [f"the {name} {count} tokens" for name, count in kept if count]
    floats += ["pages with sensitive tokens"] if cache["sensitive_ids"] else []
    text += f"; float: {', '.join(floats)}" if floats else ""
    return text + (f"; {cache['attention_pattern']}" if cache["attention_pattern"] != "dense" else "")
