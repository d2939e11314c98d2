"""The child process of the transformers engine: `python -m q38.serving.transformers_server MODEL ...`.

It is the server application that ships with transformers, with the model loaded by q38: no image
processor is needed, the n-gram table stays on disk, and a tensor that is missing or not expected is fatal.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from q38.base import settings
from q38.base.errors import Q38Error
from q38.serving.preflight import open_socket
from q38.serving.watchdog import die_with_parent

# The routes that q38 tests; transformers' others load any model, unload ours, or want audio.
ROUTES = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"}
_SHUTDOWN_S = 5  # seconds that running answers get after SIGTERM


def main() -> None:
    """Load, listen, serve; exit with q38's codes."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="q38.serving.transformers_server")
    parser.add_argument("model", type=Path)
    parser.add_argument("--ple", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", required=True)
    args = parser.parse_args()
    try:
        serve(args.model, ple=args.ple, host=args.host, port=args.port, name=args.name)
    except Q38Error as error:
        sys.stderr.write(f"q38: {error}\n")
        sys.exit(error.exit_code)


def serve(model: Path, *, ple: Path | None, host: str, port: int, name: str) -> None:
    """Serve `model` until SIGTERM."""
    settings.calm_threads()
    settings.export({"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
    # Bound before the minutes of loading, so that the port cannot be lost meanwhile.
    sock = open_socket(host, port)
    import torch
    import uvicorn

    torch.set_num_threads(settings.omp_threads())
    key = settings.load().api_key
    app = build_app(model, ple=ple, name=name, api_key=None if key == "none" else key)
    # Longer than any client keeps an idle connection, so that no request meets a closing one.
    config = uvicorn.Config(
        app, log_level="info", timeout_keep_alive=300, timeout_graceful_shutdown=_SHUTDOWN_S
    )
    uvicorn.Server(config).run(sockets=[sock])


def build_app(model: Path, *, ple: Path | None, name: str, api_key: str | None = None) -> Any:
    """The FastAPI application with the model loaded.

    Raises:
        InputError: the checkpoint lacks a tensor or holds one that the model does not have.
    """
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.utils import GenerationState

    from q38.serving.api_key import RequireKey
    from q38.serving.openai_errors import add_error_handlers
    from q38.serving.openai_handlers import ChatHandler, TextHandler
    from q38.serving.served_model import ServedModel

    served = ServedModel(model, ple=ple, name=name)
    state = GenerationState()
    unused = SimpleNamespace()  # handlers of routes that are dropped below
    app = build_server(
        served,
        ChatHandler(served, state),
        completion_handler=TextHandler(served, state),
        response_handler=unused,
        transcription_handler=unused,
        generation_state=state,
    )
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") in ROUTES]

    add_error_handlers(app)
    if api_key is not None:
        app.add_middleware(RequireKey, key=api_key)
    return app


if __name__ == "__main__":
    main()
