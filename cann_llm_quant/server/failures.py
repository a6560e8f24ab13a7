"""Every failure in the shape of OpenAI's API: `{"error": {message, type, param, code}}` and a status.

    400  a field is wrong (`param` names it)       401  no valid API key        404  unknown model or path
    413  the body is too large                     429  too many requests wait  503  the server is shutting down
    500  the model or the server failed

429 and 503 say when to try again (`Retry-After`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from cann_llm_quant.errors import CannQuantError, CorpusError, OverloadedError, RequestError
from cann_llm_quant.shown import shown

RETRY_SECONDS = 1
PYDANTIC_MESSAGES = {
    "extra_forbidden": "this server knows no such field",
    "missing": "the field is missing",
    "model_attributes_type": "send a JSON object with the header content-type: application/json",
}
TYPE_NAMES = ("str", "int", "float", "bool")
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "overloaded_error"}


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""

    def __init__(self, name: str, served: str) -> None:
        super().__init__("model", f"model {shown(name)} is not served here; it is {served!r}")


class ShuttingDownError(CannQuantError):
    """The server finishes what it has begun and takes no more."""


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """The error object of one failure."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    message = message.encode("utf-8", "replace").decode("utf-8")  # it may quote half a surrogate pair
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    """`error_body` as a response."""
    headers = {"Retry-After": str(RETRY_SECONDS)} if status in (429, 503) else None
    return JSONResponse(error_body(status, message, param, code), status, headers)


def failure_response(error: Exception) -> JSONResponse:
    """The response to an exception of this project."""
    if isinstance(error, UnknownModelError):
        return error_response(404, str(error), error.field, "model_not_found")
    if isinstance(error, RequestError):
        return error_response(400, str(error), error.field)
    if isinstance(error, CorpusError):  # the chat template refuses the messages
        return error_response(400, str(error), "messages")
    if isinstance(error, OverloadedError):
        return error_response(429, str(error), code="overloaded")
    if isinstance(error, ShuttingDownError):
        return error_response(503, str(error), code="shutting_down")
    if isinstance(error, CannQuantError):
        return error_response(500, str(error))
    return error_response(500, f"internal error: {type(error).__name__}; the server's log says more")


def validation_response(error: RequestValidationError) -> JSONResponse:
    """400 with the path of the first field that is wrong."""
    first = error.errors()[0]
    kind, path = first["type"], [str(part) for part in first["loc"][1:]]
    if kind == "json_invalid":
        return error_response(400, f"the body is not JSON: {first['ctx']['error']} at character {path[0]}")
    param = ".".join(part for part in path if _names_a_field(part)) or None
    message = PYDANTIC_MESSAGES.get(kind, first["msg"])
    return error_response(400, f"{param or 'body'}: {message}", param)


def _names_a_field(part: str) -> bool:
    """Not the name of a type: pydantic puts those of a union's alternatives into the path."""
    return (part.isidentifier() and part not in TYPE_NAMES) or part.isdecimal()


def install_failures(app: FastAPI) -> None:
    """Answer every exception in that shape."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return validation_response(error)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        return error_response(error.status_code, str(error.detail))

    @app.exception_handler(CannQuantError)
    async def failed(request: Request, error: CannQuantError) -> JSONResponse:
        return failure_response(error)

    @app.exception_handler(Exception)
    async def broke(request: Request, error: Exception) -> JSONResponse:
        return failure_response(error)


@contextmanager
def field_names(**names: str) -> Iterator[None]:
    """Say the request's own name of a field where the engine has another: `max_new_tokens="max_tokens"`."""
    try:
        yield
    except RequestError as error:
        name = names.get(error.field)
        if name is None:
            raise
        raise RequestError(name, str(error).replace(error.field, name)) from error
