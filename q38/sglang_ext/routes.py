"""Residency over HTTP, on SGLang's own server: behind its address and its API key.

GET /q38/residency            where the rows lie: per layer, on both sides, bytes
POST /q38/residency           {"action": "grow" | "shrink", "rows": N}, {"action": "fill", "reserve": BYTES},
                              {"action": "free", "bytes": N}, {"action": "place", "profile": FILE}
GET /q38/metrics              hit rate, bytes over the link, n-gram rows, KV use, for Prometheus
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from q38.base.errors import Q38Error
from q38.sglang_ext.control import ask
from q38.sglang_ext.metrics import CONTENT_TYPE, prometheus

PATH, METRICS = "/q38/residency", "/q38/metrics"
_STATUS = {2: 400, 3: 409}  # exit code of the refusal -> HTTP status


def add_routes(app: Any, control: Path) -> None:
    """Add the routes to SGLang's application; `control` is the socket of the process with the model."""
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

    async def change(request: Request) -> JSONResponse:
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
        return PlainTextResponse(prometheus(answered["status"]), media_type=CONTENT_TYPE)

    # With the future import, FastAPI could not resolve an annotation that is local to this function.
    change.__annotations__ = {"request": Request}
    app.add_api_route(PATH, status, methods=["GET"], response_model=None)
    app.add_api_route(PATH, change, methods=["POST"], response_model=None)
    app.add_api_route(METRICS, metrics, methods=["GET"], response_model=None)
