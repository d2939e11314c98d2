"""Load SGLang with the extension and check every hook: what `q38 patch-sglang verify` runs in a child process.

    python -m q38.sglang_ext.verify

prints one JSON document: the release and the hooks in place. Exit code 1 where one is not.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from q38.base import settings
from q38.base.errors import CheckFailed, Q38Error
from q38.sglang_ext.options import ExtensionOptions
from q38.sglang_ext.server import prepare_process, require_plugin


def verify() -> dict[str, Any]:
    """Load the plugin as SGLang does, then apply and verify the hooks of the process that runs the model.

    Raises:
        CheckFailed: the plugin was not loaded, or a target or a hook is not as it should be.
    """
    settings.export({settings.SGLANG: ExtensionOptions(model="").to_json()})
    prepare_process()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    require_plugin()
    from q38.sglang_ext.activate import activate
    from q38.sglang_ext.source import installed_tree, release

    hooks = activate(engine=True)
    return {"release": release(installed_tree()), "hooks": [hook.target for hook in hooks]}


def child_environment(*, gpu: bool) -> dict[str, str]:
    """Variables that the child needs beside this process's own."""
    from q38.sglang_ext.cpu import PLATFORM

    return {} if gpu else {"SGLANG_PLATFORM": PLATFORM, "TRITON_INTERPRET": "1"}


def read_answer(code: int, out: str, err: str) -> dict[str, Any]:
    """The child's document.

    Raises:
        CheckFailed: it refused or died; the message quotes it.
    """
    lines = [line for line in err.splitlines() if line.strip()]
    if code == 0 and out.strip():
        document: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return document
    said = next((line for line in reversed(lines) if line.startswith("q38: ")), lines[-1] if lines else "")
    raise CheckFailed(
        f"the extension does not load ({said.removeprefix('q38: ').rstrip('.') or f'exit code {code}'})",
        where="sglang",
        remedy="see q38 patch-sglang check",
    )


def _main() -> None:
    try:
        document = verify()
    except Q38Error as error:
        sys.stderr.write(f"q38: {error}\n")
        sys.exit(error.exit_code)
    sys.stdout.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    _main()
