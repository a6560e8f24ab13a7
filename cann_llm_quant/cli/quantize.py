"""`quantize`: a float checkpoint in, a packed one out.

Flags are shorthand for a recipe, which `--show-recipe` prints.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cann_llm_quant.cli import export_flags as export_flag
from cann_llm_quant.cli import kv_flags as kv
from cann_llm_quant.cli import quantize_flags as flag
from cann_llm_quant.cli.kv_sensitivity_table import choice_line
from cann_llm_quant.cli.kv_table import cache_facts
from cann_llm_quant.cli.options import AllowPickle, Debug, Json, Revision, parse_size
from cann_llm_quant.cli.progress import show_progress
from cann_llm_quant.cli.recipe_flags import outer_scheme, parse_group_size, resolve_recipe
from cann_llm_quant.cli.scheme_names import named_schemes
from cann_llm_quant.cli.terminal import Reply, duration, print_facts, printable, size
from cann_llm_quant.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from cann_llm_quant.pipeline import Quantized, QuantizeReport
    from cann_llm_quant.pipeline.expert_counts import ExpertCounts


def quantize(
    model: flag.OptionalModel = None,
    model_option: flag.ModelOption = None,
    output: flag.Output = None,
    recipe: flag.RecipeFile = None,
    show_recipe: flag.ShowRecipe = False,
    method: flag.Method = None,
    effort: flag.Effort = None,
    tune_steps: flag.TuneSteps = None,
    smooth_alpha: flag.SmoothAlpha = None,
    rotate: flag.Rotate = None,
    scheme: flag.Scheme = None,
    bits: flag.Bits = None,
    group_size: flag.GroupSize = None,
    symmetric: flag.Symmetric = None,
    act_range: flag.ActRange = None,
    act_percentile: flag.ActPercentile = None,
    clip: flag.Clip = None,
    target_bits: flag.TargetBits = None,
    candidates: flag.Candidates = None,
    sensitivity: flag.SensitivityFile = None,
    preset: flag.PresetName = None,
    data: flag.Data = None,
    samples: flag.Samples = None,
    seq_len: flag.SeqLen = None,
    seed: flag.Seed = None,
    allow_fewer_samples: flag.AllowFewerSamples = False,
    ignore: flag.Ignore = None,
    allow_empty_pattern: flag.AllowEmptyPattern = False,
    no_fuse_check: flag.NoFuseCheck = False,
    on_misfit: flag.OnMisfit = None,
    tensor_parallel: flag.TensorParallel = 1,
    head_bits: flag.HeadBits = None,
    embedding_bits: flag.EmbeddingBits = None,
    moe_all_experts: flag.MoeAllExperts = None,
    kv_cache: kv.KvCache = None,
    kv_bits: kv.KvBits = None,
    kv_candidates: kv.KvCandidates = None,
    kv_sensitivity: kv.KvSensitivityFile = None,
    kv_sink_tokens: kv.KvSinkTokens = None,
    kv_recent_tokens: kv.KvRecentTokens = None,
    kv_sensitive: kv.KvSensitive = None,
    kv_headroom: kv.KvHeadroom = None,
    kv_percentile: kv.KvPercentile = None,
    kv_scale: kv.KvScale = None,
    kv_smooth: kv.KvSmooth = None,
    kv_page_size: kv.KvPageSize = None,
    formats: flag.Formats = None,
    runtime: export_flag.Runtime = None,
    dialect: export_flag.Dialect = None,
    accuracy_level: export_flag.AccuracyLevel = None,
    contrib_ops: export_flag.ContribOps = True,
    soc_version: export_flag.SocVersion = None,
    tokenizer: export_flag.Tokenizer = True,
    overwrite: flag.Overwrite = False,
    max_shard_size: flag.MaxShardSize = "5GB",
    activation_budget: flag.ActivationBudget = "2GiB",
    device: flag.Device = "cpu",
    dtype: flag.Dtype = "fp32",
    revision: Revision = None,
    allow_pickle: AllowPickle = False,
    ignore_source_quant: flag.IgnoreSourceQuant = False,
    dequantize: flag.Dequantize = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Quantize a model. A killed run goes on where it was when the same command is given again."""
    flags = {
        "method": method,
        "effort": effort,
        "tuning_steps": tune_steps,
        "smooth_alpha": smooth_alpha,
        "rotate": rotate,
        "scheme": scheme,
        "bits": bits,
        "group_size": parse_group_size(group_size),
        "symmetric": symmetric,
        "act_range": act_range,
        "act_percentile": act_percentile,
        "clip": clip,
        "target_bits": target_bits,
        "candidates": None if candidates is None else named_schemes(candidates, "--candidates"),
        "preset": preset,
        "on_misfit": on_misfit,
        "expand_fusion_groups": False if no_fuse_check else None,
        "data": data or None,
        "samples": samples,
        "seq_len": seq_len,
        "seed": seed,
        "head": outer_scheme(head_bits),
        "embedding": outer_scheme(embedding_bits),
        "moe_all_experts": moe_all_experts,
        "formats": formats or None,
        "kv_cache": kv_cache,
        "kv_bits": kv_bits,
        "kv_candidates": kv_candidates,
        "kv_sink_tokens": kv_sink_tokens,
        "kv_recent_tokens": kv_recent_tokens,
        "kv_sensitive": kv_sensitive,
        "kv_headroom": kv_headroom,
        "kv_percentile": kv_percentile,
        "kv_scale": kv_scale,
        "kv_smooth": kv_smooth or None,
        "kv_page_size": kv_page_size,
    }
    resolved = resolve_recipe(recipe, flags, ignore or ())
    refuse_unused(resolved.method, flags, resolved.target_bits)
    if resolved.target_bits is None and (sensitivity is not None or candidates is not None):
        raise UsageError("--sensitivity and --candidates are for a bit target; add --target-bits B")
    if kv_sensitivity is not None and (resolved.kv_cache is None or resolved.kv_cache.budget is None):
        raise UsageError("--kv-sensitivity is for formats that are chosen; add --kv-cache auto")
    if show_recipe:
        shown = {"recipe": resolved.model_dump(mode="json")}
        Reply(json).result(shown, lambda _: typer.echo(resolved.to_json()))
        return
    source, folder = the_model(model, model_option), the_output(output)
    budget, shard = parse_size(activation_budget), parse_size(max_shard_size)
    from cann_llm_quant.export.layouts import ExportOptions
    from cann_llm_quant.pipeline import RunOptions, quantize_into

    options = RunOptions(
        device=device,
        dtype=dtype,
        activation_budget=budget,
        max_shard_bytes=shard,
        revision=revision,
        allow_pickle=allow_pickle,
        ignore_source_quant=ignore_source_quant,
        dequantize=dequantize,
        allow_empty_pattern=allow_empty_pattern,
        allow_fewer_samples=allow_fewer_samples,
        overwrite=overwrite,
        tensor_parallel=tensor_parallel,
        sensitivity=sensitivity,
        kv_sensitivity=kv_sensitivity,
    )
    exports = ExportOptions(
        runtime=runtime,
        dialect=dialect,
        accuracy_level=accuracy_level,
        contrib_ops=contrib_ops,
        soc_version=soc_version,
        tokenizer=tokenizer,
        max_shard_bytes=shard,
        overwrite=overwrite,
    )
    with show_progress("passes") as progress:
        done = quantize_into(source, folder, resolved, options=options, exports=exports, progress=progress)
    Reply(json).result(done.to_json(), lambda console: draw(console, done))


def refuse_unused(method: str, flags: Mapping[str, object], target_bits: float | None) -> None:
    """Flags that something else given makes meaningless. Raises UsageError."""
    uniform = {"bits": "--bits", "group_size": "--group-size", "symmetric": "--symmetric/--asymmetric"}
    given = [name for field, name in uniform.items() if flags[field] is not None]
    if given and target_bits is not None:
        raise UsageError(
            f"{given[0]} would be ignored: --target-bits gives each linear one of the --candidates; "
            "say bits, groups and zero points there, as in W4g64a"
        )
    if flags["effort"] is not None and method in ("none", "rtn"):
        raise UsageError(f"--effort is for methods that calibrate, not for {method}; leave it out")


def the_model(positional: str | None, option: str | None) -> str:
    """The model that was named in one of two ways.

    Raises UsageError when it was named twice or not at all.
    """
    if positional is not None and option is not None and positional != option:
        raise UsageError(f"two models were named, {positional} and {option}; name one")
    model = positional if positional is not None else option
    if not model:
        raise UsageError("no model was named; write: cann-llm-quant quantize MODEL -o FOLDER")
    return model


def the_output(output: Path | None) -> Path:
    """The output folder.

    Raises UsageError when it was not named.
    """
    if output is None:
        raise UsageError("no output was named; add -o FOLDER")
    return output


def draw(console: "Console", done: "Quantized") -> None:
    """The closing lines for people."""
    console.print(f"wrote {printable(str(done.output))}", style="bold", soft_wrap=True)
    if done.report is None:
        console.print("  native was complete already, written by an earlier run of this same command")
    else:
        print_facts(console, facts(done.report))
    for export in done.exports:
        print_facts(console, [(export.layout, f"{size(export.total_bytes)} in {printable(str(export.path))}")])


def expert_line(counts: "ExpertCounts") -> str:
    """How many calibration tokens the router sent to the experts, and what became of those that saw few."""
    least, median, most = counts.min_tokens, f"{counts.median_tokens:g}", counts.max_tokens
    few = f"{counts.few} under {counts.few_tokens}, {counts.unseen} unseen"
    solved = f"{counts.borrowing} also solved for others' tokens"
    if counts.every_token:
        solved = "all solved for every token"
    return f"{counts.count} saw {least} to {most} tokens, median {median}; {few}; {solved}"


def facts(report: "QuantizeReport") -> Iterable[tuple[str, str]]:
    """Title and text of each closing line."""
    share = report.quantized_parameters / max(report.total_parameters, 1)
    method = report.method if report.method in ("none", "rtn") else f"{report.method} ({report.effort})"
    linears, total = report.quantized_linears, report.total_parameters
    if report.bits_per_weight is None:
        yield "method", "none, weights are as they were"
    else:
        yield "method", f"{method}, {report.bits_per_weight:.3g} bits per quantized weight, scales included"
        yield "coverage", f"quantized {linears} linears, {share:.1%} of {total:,} parameters"
        yield "schemes", ", ".join(f"{scheme} for {count} linears" for scheme, count in report.formats.items())
    if report.kv_cache is not None:
        yield from cache_facts(report.kv_cache)
    if report.kv_choice is not None:
        yield "kv choice", choice_line(report.kv_choice)
    yield "size", f"{size(report.output_bytes)} from {size(report.source_bytes)}"
    if report.mean_error is not None and report.mean_rtn_error is not None:
        error, rounding = report.mean_error, report.mean_rtn_error
        yield "output error", f"{error:.4g} on average, where plain rounding gives {rounding:.4g}"
    if report.experts is not None:
        yield "experts", expert_line(report.experts)
    kept, dropped = report.kept_tensors, len(report.dropped_tensors)
    tensors = f"{report.source_tensors} in the source"
    yield "tensors", f"{tensors} = {linears} quantized + {kept} kept + {dropped} dropped"
    if report.resumed_layers:
        yield "resumed", f"{report.resumed_layers} of {report.layers} layers came from the earlier run"
    yield "cost", f"{duration(report.seconds)}, peak memory {size(report.peak_memory_bytes)}"
