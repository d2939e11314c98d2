"""SGLang's HTTP server with the extension: what the child process of `q38 serve --engine sglang` runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from q38.base import settings
from q38.base.errors import CheckFailed
from q38.sglang_ext import early_rows, early_scheduler
from q38.sglang_ext.cpu import PLATFORM
from q38.sglang_ext.options import ExtensionOptions, given
from q38.sglang_ext.routes import add_routes


def prepare_process() -> None:
    """For the server and for each process it spawns, before sglang is imported."""
    if settings.sglang_platform() == PLATFORM:
        from q38.sglang_ext.cpu.prepare import prepare

        prepare()


def run(arguments: Sequence[str]) -> None:
    """Serve until SIGTERM. The API key comes from the environment: a command line is visible to every user.

    Raises:
        CheckFailed: SGLang did not load the extension.
    """
    options, waiting = given(), None
    if options is not None:
        early_rows.start(options)
        waiting = early_scheduler.start(options)
    with early_scheduler.taken_over(waiting):
        _serve(arguments, options)


def _serve(arguments: Sequence[str], options: ExtensionOptions | None) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    require_plugin()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    server_args = prepare_server_args(list(arguments))
    key = settings.load().api_key
    server_args.api_key = None if key == "none" else key
    if options is not None and options.control is not None:
        from sglang.srt.entrypoints.http_server import app

        add_routes(app, Path(options.control), key=server_args.api_key)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def require_plugin() -> None:
    """Check that SGLang loaded the plugin: it only logs one that it cannot import or was told to leave out.

    Raises:
        CheckFailed: it did not.
    """
    from q38.sglang_ext.activate import EVERYWHERE, collect
    from q38.sglang_ext.hooks import in_place

    if not all(in_place(hook) for hook in collect(EVERYWHERE)):
        raise CheckFailed(
            "SGLang did not load q38's plugin",
            where="sglang",
            remedy="install q38 again (its entry point is missing), and unset SGLANG_PLUGINS",
        )
