"""The key middleware of the transformers engine, around an application that counts its calls."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from q38.serving.api_key import RequireKey


def call(path: str, header: bytes | None) -> tuple[int, Any]:
    """Status and body; 200 and None from the application itself."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [] if header is None else [(b"authorization", header)]
    scope = {"type": "http", "path": path, "headers": headers, "method": "GET"}
    asyncio.run(RequireKey(app, key="sesam\u00e9")(scope, None, send))
    return sent[0]["status"], json.loads(sent[1]["body"]) if len(sent) > 1 else None


def test_the_right_key_passes() -> None:
    assert call("/v1/models", "Bearer sesam\u00e9".encode()) == (200, None)


@pytest.mark.parametrize(
    "header", [None, b"", b"Bearer ", b"Bearer sesam", "sesam\u00e9".encode(), b"Bearer wrong"]
)
def test_every_other_key_is_refused_in_openais_shape(header: bytes | None) -> None:
    status, body = call("/v1/models", header)
    assert status == 401
    assert "API key" in body["error"]["message"]


def test_health_needs_no_key() -> None:
    assert call("/health", None) == (200, None)
