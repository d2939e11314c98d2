"""ASGI middleware of the transformers engine: requests need the key."""

from __future__ import annotations

import hmac
from typing import Any

from q38.serving.openai_errors import error_response

_PUBLIC = {"/health"}


class RequireKey:
    """Every path but /health needs `Authorization: Bearer KEY`; others get 401."""

    def __init__(self, app: Any, *, key: str) -> None:
        self.app = app
        self.expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] in _PUBLIC or self._allowed(scope):
            await self.app(scope, receive, send)
            return
        refusal = error_response("the API key is missing or wrong; send it as a bearer token", 401)
        await refusal(scope, receive, send)

    def _allowed(self, scope: Any) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        # In constant time: the answer's delay must not tell how much of the key is right.
        return hmac.compare_digest(given, self.expected)
