"""Residency over HTTP, on SGLang's own server: behind its address and its API key.

GET /q38/residency            where the rows lie: per layer, on both sides, bytes
POST /q38/residency           {"action": "grow" | "shrink", "rows": N}, {"action": "fill", "reserve": BYTES},
                              {"action": "free", "bytes": N}, {"action": "place", "profile": FILE};
                              Content-Type: application/json
GET /q38/routing              how often each expert was chosen, for a routing profile
GET /q38/metrics              hit rate, bytes over the link, n-gram rows, KV use, for Prometheus
GET /metrics                  the same behind SGLang's own figures
"""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any

from q38.base.errors import InputError, Q38Error
from q38.sglang_ext.control import ask
from q38.sglang_ext.metrics import CONTENT_TYPE, prometheus

PATH, ROUTING, METRICS = "/q38/residency", "/q38/routing", "/q38/metrics"
SGLANG_METRICS = "/metrics"
_STATUS = {2: 400, 3: 409}  # exit code of the refusal -> HTTP status


def add_routes(app: Any, control: Path, *, key: str | None = None) -> None:
    """Add the routes to SGLang's application, before it starts and adds its own.

    Args:
        control: socket of the process with the model.
        key: the server's API key. SGLang lets /metrics pass without it, so that is checked here.
    """
    from fastapi import Request
    from fastapi.concurrency import run_in_threadpool
    from fastapi.responses import JSONResponse, PlainTextResponse

    async def answer(request: dict[str, Any]) -> JSONResponse:
        try:
            document = await run_in_threadpool(ask, control, request)
        except Q38Error as error:
            return JSONResponse(error.to_dict(), 503)
        refusal = document.get("error")
        return JSONResponse(document, _STATUS.get(refusal["exit_code"], 500) if refusal else 200)

    async def status() -> JSONResponse:
        return await answer({"action": "status"})

    async def routing() -> JSONResponse:
        return await answer({"action": "routing"})

    async def change(request: Request) -> JSONResponse:
        # What a page of another site can have a browser send without asking this server first is no JSON by its type.
        kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            refusal = InputError(
                f"a body of type '{kind}'", where=PATH, remedy="send Content-Type: application/json"
            )
            return JSONResponse(refusal.to_dict(), 415)
        try:
            body = await request.json()
        except ValueError:
            body = None
        return await answer(body if isinstance(body, dict) else {"action": body})

    async def metrics() -> Any:
        try:
            answered = await run_in_threadpool(ask, control, {"action": "status"})
        except Q38Error as error:
            return JSONResponse(error.to_dict(), 503)
        if "error" in answered:
            return JSONResponse(answered, 503)
        return PlainTextResponse(prometheus(answered["status"]), media_type=CONTENT_TYPE)

    async def all_metrics(request: Request, rest: str) -> Any:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        known = scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), (key or "").encode())
        if key is not None and not known:
            return JSONResponse({"error": "Unauthorized"}, 401)
        own = await metrics()
        # A scrape must not fail because the process with the model is busy or gone: SGLang's figures tell of that.
        told = own.body.decode() if own.status_code == 200 else ""
        return PlainTextResponse(_sglang_metrics() + told, media_type=CONTENT_TYPE)

    # With the future import, FastAPI could not resolve an annotation that is local to this function.
    change.__annotations__ = {"request": Request}
    all_metrics.__annotations__ = {"request": Request, "rest": str}
    app.add_api_route(PATH, status, methods=["GET"], response_model=None)
    app.add_api_route(PATH, change, methods=["POST"], response_model=None)
    app.add_api_route(ROUTING, routing, methods=["GET"], response_model=None)
    app.add_api_route(METRICS, metrics, methods=["GET"], response_model=None)
    # Whatever follows the name: SGLang's own route takes that too.
    app.add_api_route(SGLANG_METRICS + "{rest:path}", all_metrics, methods=["GET"], response_model=None)


def _sglang_metrics() -> str:
    """The figures of all of SGLang's processes, as its own route writes them."""
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    text: str = generate_latest(registry).decode()
    return text
