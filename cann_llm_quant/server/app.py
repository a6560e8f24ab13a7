"""The ASGI application of one engine."""

import time
from dataclasses import dataclass

from fastapi import FastAPI

from cann_llm_quant import __version__
from cann_llm_quant.server import about, chat, completions, generate
from cann_llm_quant.server.auth import ApiKey
from cann_llm_quant.server.body_limit import BodyLimit
from cann_llm_quant.server.engine_door import Engine
from cann_llm_quant.server.failures import install_failures
from cann_llm_quant.server.metrics import CountResponses
from cann_llm_quant.server.service import Service

PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/generate", "/v1/models", "/health", "/metrics"})


@dataclass(frozen=True)
class AppOptions:
    """`model_name` is what requests name as their model; `max_body_bytes` bounds each request's body."""

    model_name: str
    api_key: str | None = None
    max_body_bytes: int = 8 * 2**20


def create_app(engine: Engine, options: AppOptions) -> FastAPI:
    """The application; its state (`app.state.service`) says what is in progress. The caller closes the engine.

    A request meets, in this order: counting, the API key, the bound on its body, the endpoint.
    """
    app = FastAPI(title="cann-llm-quant", version=__version__, docs_url=None, redoc_url=None)
    service = Service(engine, options.model_name, int(time.time()))
    app.state.service = service
    install_failures(app)
    for part in (completions, chat, generate, about):
        app.include_router(part.router)
    app.add_middleware(BodyLimit, limit=options.max_body_bytes)
    if options.api_key is not None:
        app.add_middleware(ApiKey, key=options.api_key)
    app.add_middleware(CountResponses, metrics=service.metrics, paths=PATHS)
    return app
