"""The flags of `quantize`, by section of its help page.

Defaults that a help text gives in brackets are the recipe's; such a flag is None unless it was given.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from cann_llm_quant.cli.options import MODEL_HELP, MODEL_SECTION

SCHEME, MIXED, TEXT, LINEARS, RESOURCES = (
    "Scheme",
    "Mixed precision",
    "Calibration text",
    "Which linears",
    "Output and resources",
)

OptionalModel = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
ModelOption = Annotated[str | None, typer.Option("--model", metavar="MODEL", help="Another way to name MODEL.")]
Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FOLDER", help="Folder to write; appears when it is whole. Required."),
]
RecipeFile = Annotated[
    Path | None,
    typer.Option("--recipe", metavar="FILE", help="YAML or JSON recipe; other flags override it."),
]
ShowRecipe = Annotated[bool, typer.Option("--show-recipe", help="Print the resolved recipe and stop.")]

Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        "--quant-method",
        metavar="NAME",
        help="rtn (rounding), gptq (error feedback), awq or smoothquant (scaling; smoothquant for quantized inputs), "
        "or several joined by +, such as smoothquant+awq+gptq; none leaves weights as they are, for --kv-cache alone. "
        "[default: gptq]",
        rich_help_panel=SCHEME,
    ),
]
Effort = Annotated[
    Literal["fast", "balanced", "best"] | None,
    typer.Option(
        "--effort",
        help="What the method may cost (not for rtn). gptq: fast runs the quantized model only, balanced runs the "
        "float model beside it and aims at its outputs, best refines codes and scales in three rounds instead of one. "
        "[default: balanced]",
        rich_help_panel=SCHEME,
    ),
]
TuneSteps = Annotated[
    int | None,
    typer.Option(
        "--tune-steps",
        metavar="N",
        help="Gradient steps that tune each layer's scales and norms after gptq (effort balanced or best, inputs in "
        "float); 60 take about three times as long. "
        "[default: 0]",
        rich_help_panel=SCHEME,
    ),
]
SmoothAlpha = Annotated[
    float | None,
    typer.Option(
        "--smooth-alpha",
        metavar="0..1",
        help="smoothquant's exponent for all sites. [default: searched for each]",
        rich_help_panel=SCHEME,
    ),
]
Rotate = Annotated[
    bool | None,
    typer.Option(
        "--rotate/--no-rotate",
        help="Spread outlier channels by Hadamard rotations folded into the weights; for inputs in 4 or 8 bits. "
        "[default: no]",
        rich_help_panel=SCHEME,
    ),
]
Scheme = Annotated[
    str | None,
    typer.Option(
        "--scheme",
        metavar="NAME",
        help="Number formats of weights and of inputs (A16: inputs stay in float): W4A16, W4A8, W4A4, W8A16, W8A8, "
        "W8A8-static, W3A16, W2A16, FP8, FP8-static, FP8-block, FP8A16, MXFP8, MXFP4, NVFP4, MXFP8A16, MXFP4A16, "
        "NVFP4A16. Flags below override it. [default: W4A16]",
        rich_help_panel=SCHEME,
    ),
]
Bits = Annotated[
    int | None,
    typer.Option("--bits", metavar="2|3|4|5|6|8", help="Bits of a code. [default: 4]", rich_help_panel=SCHEME),
]
GroupSize = Annotated[
    str | None,
    typer.Option(
        "--group-size",
        metavar="N",
        help="Columns that share a scale; -1 is one scale per row, tensor one per matrix, block one per 128 x 128 tile "
        "(FP8). [default: 128, or the largest that fits a linear]",
        rich_help_panel=SCHEME,
    ),
]
Symmetric = Annotated[
    bool | None,
    typer.Option(
        "--symmetric/--asymmetric",
        help="Without or with zero points. [default: symmetric]",
        rich_help_panel=SCHEME,
    ),
]
ActRange = Annotated[
    Literal["minmax", "moving", "percentile", "mse", "entropy"] | None,
    typer.Option(
        "--act-range",
        help="How static schemes (W8A8-STATIC, FP8-STATIC) estimate the ranges of activations. [default: minmax]",
        rich_help_panel=SCHEME,
    ),
]
ActPercentile = Annotated[
    float | None,
    typer.Option(
        "--act-percentile",
        metavar="P",
        help="Percentile of the activations' magnitudes that static ranges reach. [default: 99.9]",
        rich_help_panel=SCHEME,
    ),
]
Clip = Annotated[
    bool | None,
    typer.Option(
        "--clip/--no-clip",
        help="Search for tighter ranges than min-max. [default: no for rtn, else yes]",
        rich_help_panel=SCHEME,
    ),
]

Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="SOURCE",
        help="A .txt, .md, .jsonl, .json, .csv or .parquet file, or a hub dataset. Repeatable. "
        "[default: text inside the package]",
        rich_help_panel=TEXT,
    ),
]
Samples = Annotated[
    int | None,
    typer.Option("--samples", metavar="N", help="Windows of text. [default: 128]", rich_help_panel=TEXT),
]
SeqLen = Annotated[
    int | None,
    typer.Option("--seq-len", metavar="N", help="Tokens in a window. [default: 512]", rich_help_panel=TEXT),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="Picks the windows. [default: 0]", rich_help_panel=TEXT),
]
AllowFewerSamples = Annotated[
    bool,
    typer.Option("--allow-fewer-samples", help="Go on when the text is too short.", rich_help_panel=TEXT),
]

TargetBits = Annotated[
    float | None,
    typer.Option(
        "--target-bits",
        metavar="B",
        help="Stored bits per weight on average, scales included, such as 4.25: measures each linear's sensitivity and "
        "gives every linear one of the candidates.",
        rich_help_panel=MIXED,
    ),
]
Candidates = Annotated[
    str | None,
    typer.Option(
        "--candidates",
        metavar="LIST",
        help="Schemes to choose from: W4g64, W4g64a (asymmetric), W8 (one scale a row), float. "
        "[default: W4g64,W3g64,W4g128,W4g32,W5g64,W6g64,W8]",
        rich_help_panel=MIXED,
    ),
]
SensitivityFile = Annotated[
    Path | None,
    typer.Option(
        "--sensitivity",
        metavar="FILE",
        help="What cann-llm-quant sensitivity -o has measured, instead of measuring.",
        rich_help_panel=MIXED,
    ),
]
PresetName = Annotated[
    Literal["attention-fp16-ffn-int8", "edges-int8"] | None,
    typer.Option(
        "--preset",
        help="Attention in float and MLPs in INT8; or INT8 for q/k/v and down of the first and last eighth of layers.",
        rich_help_panel=MIXED,
    ),
]

Ignore = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="PATTERN",
        help="Leave linears in float: a full name, glob:… or re:…, each matching the whole name. Repeatable.",
        rich_help_panel=LINEARS,
    ),
]
AllowEmptyPattern = Annotated[
    bool,
    typer.Option("--allow-empty-pattern", help="Accept a pattern that matches nothing.", rich_help_panel=LINEARS),
]
NoFuseCheck = Annotated[
    bool,
    typer.Option(
        "--no-fuse-check",
        help="Let members of q/k/v or gate/up differ, which runtimes that fuse them cannot load.",
        rich_help_panel=LINEARS,
    ),
]
OnMisfit = Annotated[
    Literal["error", "smaller", "skip"] | None,
    typer.Option(
        "--on-misfit",
        help="When the given group size does not divide a linear's input. [default: error]",
        rich_help_panel=LINEARS,
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tp",
        metavar="N",
        min=1,
        show_default=False,
        help="Warn where N devices could not split whole groups.",
        rich_help_panel=LINEARS,
    ),
]

HeadBits = Annotated[
    int | None,
    typer.Option(
        "--head-bits",
        metavar="2|3|4|5|6|8",
        help="Quantize the output head: 8 bits with one scale a row, fewer in groups. [default: float]",
        rich_help_panel=LINEARS,
    ),
]
EmbeddingBits = Annotated[
    int | None,
    typer.Option(
        "--embedding-bits",
        metavar="8",
        help="Quantize the embedding: INT8 with one scale a row; a tied head goes with it. [default: float]",
        rich_help_panel=LINEARS,
    ),
]
MoeAllExperts = Annotated[
    bool | None,
    typer.Option(
        "--moe-all-experts/--moe-routed",
        help="Calibrate every expert on every token; or on those routed to it and, where they are few, on others by "
        "the chance that the router gives them. [default: routed]",
        rich_help_panel=LINEARS,
    ),
]

Formats = Annotated[
    list[str] | None,
    typer.Option(
        "--format",
        metavar="LAYOUT",
        help="Layout to write, repeated for several: native, ascend, awq, gptq, gptq_v2, mlx, gguf, onnx, float. With "
        "any but native alone, FOLDER holds a folder for each, native among them. [default: native]",
        rich_help_panel=RESOURCES,
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace an existing or unfinished output.", rich_help_panel=RESOURCES),
]
MaxShardSize = Annotated[
    str,
    typer.Option("--max-shard-size", metavar="SIZE", help="Largest weight file.", rich_help_panel=RESOURCES),
]
ActivationBudget = Annotated[
    str,
    typer.Option(
        "--activation-budget",
        metavar="SIZE",
        help="Activations kept in memory; past it they are spooled to disk beside the output.",
        rich_help_panel=RESOURCES,
    ),
]
Device = Annotated[
    str,
    typer.Option("--device", metavar="DEVICE", help="cpu, cuda or npu, also cuda:1.", rich_help_panel=RESOURCES),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="fp32, bf16 or fp16 for the layers' arithmetic.",
        rich_help_panel=RESOURCES,
    ),
]
Dequantize = Annotated[
    bool,
    typer.Option(
        "--dequantize",
        help="Read a source that is quantized already (FP8, GPTQ, AWQ, ...) as the float model that its codes mean.",
        rich_help_panel=MODEL_SECTION,
    ),
]
IgnoreSourceQuant = Annotated[
    bool,
    typer.Option(
        "--ignore-source-quant",
        help="Treat the source as float although its config calls it quantized.",
        rich_help_panel=MODEL_SECTION,
    ),
]
