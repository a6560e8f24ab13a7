"""`serve`: one model over HTTP, with OpenAI's API."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cann_llm_quant.cli import kv_run_flags as kv
from cann_llm_quant.cli.kv_run_flags import kv_choice
from cann_llm_quant.cli.options import AllowPickle, Debug, Device, Dtype, Json, Kernel, Model, Revision, parse_size
from cann_llm_quant.cli.terminal import Reply
from cann_llm_quant.errors import UsageError

if TYPE_CHECKING:
    import socket

    from rich.console import Console

SERVER = "Server"
ENGINE = "Engine"
LIBRARIES = ("fastapi", "uvicorn", "prometheus_client")
API_KEY_VARIABLE = "CANN_LLM_QUANT_API_KEY"


def serve(
    model: Model,
    host: Annotated[
        str, typer.Option("--host", metavar="HOST", help="0.0.0.0 lets other machines in.", rich_help_panel=SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="N", help="0 takes any free one.", rich_help_panel=SERVER)
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            envvar=API_KEY_VARIABLE,
            help="Answer only requests that carry it.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option(
            "--model-name",
            metavar="NAME",
            help="What requests call the model. [default: its folder's name]",
            rich_help_panel=SERVER,
        ),
    ] = None,
    max_body: Annotated[
        str, typer.Option("--max-body", metavar="SIZE", help="Largest request.", rich_help_panel=SERVER)
    ] = "8MiB",
    drain: Annotated[
        float,
        typer.Option(
            "--drain",
            metavar="SECONDS",
            help="When told to stop, let answers end for so long.",
            rich_help_panel=SERVER,
        ),
    ] = 30.0,
    max_context: Annotated[
        int | None,
        typer.Option(
            "--max-context",
            metavar="N",
            help="Longest text, prompt and answer. [default: the model's]",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    max_batch_size: Annotated[
        int,
        typer.Option("--max-batch-size", metavar="N", help="Requests computed together.", rich_help_panel=ENGINE),
    ] = 16,
    max_batch_tokens: Annotated[
        int,
        typer.Option(
            "--max-batch-tokens",
            metavar="N",
            help="Tokens of a step; longer prompts are taken in parts.",
            rich_help_panel=ENGINE,
        ),
    ] = 512,
    max_waiting: Annotated[
        int,
        typer.Option(
            "--max-waiting", metavar="N", help="Requests that may queue; more are answered 429.", rich_help_panel=ENGINE
        ),
    ] = 1024,
    gather_ms: Annotated[
        float,
        typer.Option(
            "--gather-ms", metavar="MS", help="How long an idle engine waits for company.", rich_help_panel=ENGINE
        ),
    ] = 0.0,
    kv_cache: kv.RunKvCache = None,
    kv_sink_tokens: kv.RunKvSinkTokens = None,
    kv_recent_tokens: kv.RunKvRecentTokens = None,
    kv_sensitive: kv.RunKvSensitive = None,
    page_size: kv.RunPageSize = None,
    attention_pattern: kv.AttentionPattern = "dense",
    memory_budget: Annotated[
        str | None,
        typer.Option(
            "--memory-budget",
            metavar="SIZE",
            help="Memory of the KV cache. [default: half of what is free]",
            rich_help_panel=kv.KV,
        ),
    ] = None,
    kv_pages: Annotated[
        int | None,
        typer.Option(
            "--kv-pages", metavar="N", help="Pages of the KV cache. [default: what memory holds]", rich_help_panel=kv.KV
        ),
    ] = None,
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache", help="Share the pages of equal beginnings.", rich_help_panel=kv.KV
        ),
    ] = True,
    min_prefix_len: Annotated[
        int,
        typer.Option("--min-prefix-len", metavar="N", help="Shortest beginning that is shared.", rich_help_panel=kv.KV),
    ] = 0,
    eviction: Annotated[
        Literal["lru", "lfu"],
        typer.Option(
            "--eviction", help="Which shared pages go first: least recent, least used.", rich_help_panel=kv.KV
        ),
    ] = "lru",
    preemption: Annotated[
        Literal["recompute", "swap"],
        typer.Option(
            "--preemption",
            help="When pages run out, the youngest request's are computed again or moved outside.",
            rich_help_panel=kv.KV,
        ),
    ] = "recompute",
    host_offload: Annotated[
        str,
        typer.Option(
            "--host-offload", metavar="SIZE", help="Host memory for pages moved outside.", rich_help_panel=kv.KV
        ),
    ] = "0",
    disk_offload: Annotated[
        str,
        typer.Option("--disk-offload", metavar="SIZE", help="Disk for pages moved outside.", rich_help_panel=kv.KV),
    ] = "0",
    offload_folder: Annotated[
        Path | None,
        typer.Option(
            "--offload-folder",
            metavar="FOLDER",
            help="Where the disk's part lies. [default: the system's temporary]",
            rich_help_panel=kv.KV,
        ),
    ] = None,
    kernel: Kernel = "auto",
    device: Device = "cpu",
    dtype: Dtype = "fp32",
    revision: Revision = None,
    allow_pickle: AllowPickle = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Serve a model over HTTP with OpenAI's API. Ctrl-C lets running answers end; a second one cancels them."""
    check_libraries()
    # a key read from a file often ends with a newline, which no header can carry
    api_key = None if api_key is None else api_key.strip()
    if api_key == "":
        raise UsageError(f"--api-key is empty; give a key, or leave it and {API_KEY_VARIABLE} out")
    if not 0 <= drain < float("inf"):
        raise UsageError(f"--drain {drain} must be a number of seconds, 0 or more")
    options: dict[str, Any] = {
        "max_context": max_context,
        "max_batch_size": max_batch_size,
        "max_batch_tokens": max_batch_tokens,
        "max_waiting": max_waiting,
        "gather_ms": gather_ms,
        "memory_budget": None if memory_budget is None else parse_size(memory_budget),
        "kv_pages": kv_pages,
        "prefix_cache": prefix_cache,
        "min_prefix_len": min_prefix_len,
        "eviction": eviction,
        "preemption": preemption,
        "host_offload": parse_size(host_offload),
        "disk_offload": parse_size(disk_offload),
        "offload_folder": offload_folder,
        "attention_pattern": attention_pattern,
        "kv_cache": kv_choice(kv_cache, kv_sink_tokens, kv_recent_tokens, kv_sensitive),
    }
    if page_size is not None:
        options["page_size"] = page_size
    body_bytes = parse_size(max_body)
    from cann_llm_quant.server.serving import open_socket

    reply = Reply(json)
    with open_socket(host, port) as bound:
        from cann_llm_quant.runner import LLMEngine
        from cann_llm_quant.server.app import AppOptions, create_app
        from cann_llm_quant.server.serving import serve as run_server

        source: dict[str, Any] = {"device": device, "dtype": dtype, "kernel": kernel, "revision": revision}
        with LLMEngine(model, allow_pickle=allow_pickle, **source, **options) as engine:
            name = model_name or served_name(model)
            app = create_app(engine, AppOptions(name, api_key, body_bytes))
            run_server(
                app, bound, drain_seconds=drain, ready=lambda: announce(reply, name, bound, guarded=api_key is not None)
            )


def check_libraries() -> None:
    """UsageError where the extra `serve` is not installed."""
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        raise UsageError(f"serve needs {', '.join(missing)}: pip install 'cann-llm-quant[serve]'")


def served_name(model: str) -> str:
    """A folder's or file's own name; a hub id as it is."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def announce(reply: Reply, name: str, bound: "socket.socket", *, guarded: bool) -> None:
    """Say where the server is, and who may use it."""
    from cann_llm_quant.server.serving import is_loopback, url_of

    url = url_of(bound)

    def show(console: "Console") -> None:
        console.print(f"serving {name} at {url}/v1; Ctrl-C ends it", soft_wrap=True)

    if not guarded and not is_loopback(bound):
        reply.note(f"warning: everybody who reaches {url} can use this server; set --api-key or {API_KEY_VARIABLE}")
    reply.result({"model": name, "url": f"{url}/v1"}, show)
