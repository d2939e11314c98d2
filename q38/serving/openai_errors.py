"""Errors of the transformers engine in OpenAI's shape, whatever raised them."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from q38.serving.openai_requests import BadRequest


def error_document(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_response(message: str, status: int, param: str | None = None) -> JSONResponse:
    """The same as an HTTP answer."""
    return JSONResponse(error_document(message, status, param), status)


def add_error_handlers(app: Any) -> None:
    """Let a FastAPI application answer every failure this way."""
    app.add_exception_handler(BadRequest, _bad_request)
    app.add_exception_handler(RequestValidationError, _not_an_object)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal)


async def _bad_request(_request: Request, error: BadRequest) -> JSONResponse:
    return error_response(error.message, error.status, error.param)


async def _not_an_object(_request: Request, error: RequestValidationError) -> JSONResponse:
    return error_response(f"the body is not a JSON object: {error.errors()[0]['msg']}", 400)


async def _http_error(_request: Request, error: HTTPException) -> JSONResponse:
    return error_response(str(error.detail), error.status_code)


async def _internal(_request: Request, error: Exception) -> JSONResponse:
    return error_response(f"{type(error).__name__}: {error}", 500)
