"""The flags of `quantize` for the KV cache; like the others they are None unless they were given."""

from pathlib import Path
from typing import Annotated

import typer

KV = "KV cache"

KvCache = Annotated[
    str | None,
    typer.Option(
        "--kv-cache",
        metavar="SPEC",
        help="Formats of keys and values: int8, int4, fp8_e4m3, fp8_e5m2, fp16, bf16 or float, with options such as "
        "int8-head or 'k=int8-channel v=int4-token'; by layer as 'first 30%: fp8_e5m2, last 30%: fp16'; auto "
        "measures which layers bear which, within --kv-bits. vLLM and transformers know fp8_e4m3 and "
        "int8-tensor. [default: float]",
        rich_help_panel=KV,
    ),
]
KvBits = Annotated[
    float | None,
    typer.Option(
        "--kv-bits",
        metavar="B",
        help="Stored bits per value on average, scales included, for --kv-cache auto: measures the KL of each layer's "
        "K and V apart and gives each one of the candidates. [default: 8, half of FP16]",
        rich_help_panel=KV,
    ),
]
KvCandidates = Annotated[
    str | None,
    typer.Option(
        "--kv-candidates",
        metavar="LIST",
        help="Formats that auto chooses from; the first is measured, others follow from it. "
        "[default: int4,int4-g32-asym,int8,int8-channel,int8-channel-dynamic,int8-token,fp8_e4m3,fp16]",
        rich_help_panel=KV,
    ),
]
KvSensitivityFile = Annotated[
    Path | None,
    typer.Option(
        "--kv-sensitivity",
        metavar="FILE",
        help="What cann-llm-quant sensitivity --kv-cache -o has measured, instead of measuring.",
        rich_help_panel=KV,
    ),
]
KvSinkTokens = Annotated[
    int | None,
    typer.Option(
        "--kv-sink-tokens",
        metavar="N",
        help="First tokens of a text whose pages stay in float. [default: 0]",
        rich_help_panel=KV,
    ),
]
KvRecentTokens = Annotated[
    int | None,
    typer.Option(
        "--kv-recent-tokens",
        metavar="N",
        help="Latest tokens whose pages stay in float. [default: 0]",
        rich_help_panel=KV,
    ),
]
KvSensitive = Annotated[
    str | None,
    typer.Option(
        "--kv-sensitive",
        metavar="LIST",
        help="Pages that hold such tokens stay in float: numbers, names or both.",
        rich_help_panel=KV,
    ),
]
KvHeadroom = Annotated[
    float | None,
    typer.Option(
        "--kv-headroom",
        metavar="X",
        help="Reach of stored scales, in units of the range that calibration saw. [default: 1]",
        rich_help_panel=KV,
    ),
]
KvPercentile = Annotated[
    float | None,
    typer.Option(
        "--kv-percentile",
        metavar="P",
        help="Percentage of the values that stored scales reach. [default: 100]",
        rich_help_panel=KV,
    ),
]
KvScale = Annotated[
    float | None,
    typer.Option(
        "--kv-scale",
        metavar="S",
        help="One scale for everything instead of measured ones, such as 1.0.",
        rich_help_panel=KV,
    ),
]
KvSmooth = Annotated[
    bool | None,
    typer.Option(
        "--kv-smooth/--no-kv-smooth",
        help="Even out K's channels first, by powers of two folded into q and k. [default: no]",
        rich_help_panel=KV,
    ),
]
KvPageSize = Annotated[
    int | None,
    typer.Option(
        "--kv-page-size",
        metavar="16|32|128",
        help="Tokens of a page, which dynamic scales of channels, heads and tensors belong to. [default: 32]",
        rich_help_panel=KV,
    ),
]
