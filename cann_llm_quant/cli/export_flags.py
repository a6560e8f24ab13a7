"""The options of `export`, which `quantize --format` shares."""

from typing import Annotated

import typer

_NAMES = "compressed-tensors (or native), ascend, awq, gptq, gptq_v2, mlx, gguf, onnx"

To = Annotated[
    str, typer.Option("--to", metavar="LAYOUT", help=f"One of {_NAMES}, float (dequantized).", show_default=False)
]
Regroup = Annotated[
    int | None,
    typer.Option(
        "--regroup", metavar="N", help="Split wider groups into groups of N; exact, scales are repeated.", min=1
    ),
]
Requantize = Annotated[
    bool,
    typer.Option("--requantize", help="Round linears anew that the layout cannot hold as they are; not exact."),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="Float tensors of float, gguf and onnx: fp32, bf16 or fp16. [default: as the source has them; for onnx "
        "fp32, with --dialect cann fp16]",
    ),
]
Runtime = Annotated[
    str | None,
    typer.Option("--runtime", metavar="NAME", help="What Ascend files are for, as vllm-ascend-0.23 or mindie."),
]
Dialect = Annotated[
    str | None,
    typer.Option("--dialect", metavar="NAME", help="Operators of ONNX: ort (ONNX Runtime) or cann (atc)."),
]
AccuracyLevel = Annotated[
    int | None,
    typer.Option(
        "--accuracy-level",
        metavar="0..4",
        help="MatMulNBits' accuracy_level in ONNX Runtime; 4 rounds inputs to int8: faster, not exact. [default: 1]",
    ),
]
ContribOps = Annotated[
    bool,
    typer.Option(
        "--contrib-ops/--no-contrib-ops",
        help="Whether ONNX may hold ONNX Runtime's own operators, or standard ones alone, which are slower.",
    ),
]
SocVersion = Annotated[
    str | None,
    typer.Option(
        "--soc-version",
        metavar="NAME",
        help="The NPU that the command of --dialect cann names to atc. [default: Ascend910B1]",
    ),
]
Tokenizer = Annotated[
    bool,
    typer.Option("--tokenizer/--no-tokenizer", help="Whether a GGUF file holds the vocabulary; llama.cpp wants it."),
]

KvCache = Annotated[
    bool,
    typer.Option("--kv-cache/--no-kv-cache", help="Whether Ascend files say how the KV cache is quantized."),
]


def layout(name: str) -> str:
    """The layout that a user's name means."""
    return "compressed-tensors" if name == "native" else name
