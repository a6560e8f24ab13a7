"""`GET /v1/models`, `/health` and `/metrics`."""

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from cann_llm_quant.server.service import Service, service_of

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> JSONResponse:
    """The one model that is served."""
    return JSONResponse({"object": "list", "data": [_card(service_of(request))]})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> JSONResponse:
    """The model of this name; 404 for another."""
    service = service_of(request)
    service.check_model(name)
    return JSONResponse(_card(service))


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 while requests are taken, 503 while the server shuts down."""
    draining = service_of(request).draining
    return JSONResponse({"status": "shutting down" if draining else "ok"}, 503 if draining else 200)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(service_of(request).metrics.page(), media_type=CONTENT_TYPE_LATEST)


def _card(service: Service) -> dict[str, object]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "cann-llm-quant",
        "max_model_len": service.engine.max_context,
    }
