"""The KV cache's flags of commands that run a model, where files may have a policy already."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cann_llm_quant.runner.kv_policy import KvChoice

KV = "KV cache"

RunKvCache = Annotated[
    str | None,
    typer.Option(
        "--kv-cache",
        metavar="SPEC",
        help="Formats of keys and values as in quantize, such as int8-token or 'first 30%: fp8_e5m2-dynamic'; float "
        "keeps the compute dtype. Scales that the files lack must be dynamic. [default: what the files say]",
        rich_help_panel=KV,
    ),
]
RunKvSinkTokens = Annotated[
    int | None,
    typer.Option("--kv-sink-tokens", metavar="N", help="First tokens whose pages stay in float.", rich_help_panel=KV),
]
RunKvRecentTokens = Annotated[
    int | None,
    typer.Option(
        "--kv-recent-tokens", metavar="N", help="Latest tokens whose pages stay in float.", rich_help_panel=KV
    ),
]
RunKvSensitive = Annotated[
    str | None,
    typer.Option(
        "--kv-sensitive",
        metavar="LIST",
        help="Pages with such tokens stay in float: numbers, names or both; none for no class.",
        rich_help_panel=KV,
    ),
]
RunPageSize = Annotated[
    int | None,
    typer.Option(
        "--page-size", metavar="16|32|128", help="Tokens of a page. [default: the files', or 16]", rich_help_panel=KV
    ),
]
AttentionPattern = Annotated[
    str,
    typer.Option(
        "--attention-pattern",
        metavar="NAME",
        help="dense, or such as local_window_256+global_first_last: pages outside are not kept.",
        rich_help_panel=KV,
    ),
]


def kv_choice(
    scheme: str | None, sink_tokens: int | None, recent_tokens: int | None, sensitive: str | None
) -> "KvChoice":
    """What the flags replace of a model's own policy."""
    from cann_llm_quant.runner.kv_policy import KvChoice

    classes = None if sensitive is None else tuple(part.strip() for part in sensitive.split(","))
    return KvChoice(scheme, sink_tokens, recent_tokens, () if classes == ("none",) else classes)
