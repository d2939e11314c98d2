"""The child process of the sglang engine: `python -m q38.serving.sglang_server SGLANG-OPTIONS...`.

SGLang spawns its scheduler and detokenizer from here, so the first lines run in each of them.
"""

from __future__ import annotations

import sys

from q38.base.errors import Q38Error
from q38.serving.watchdog import die_with_parent
from q38.sglang_ext.server import prepare_process, run

prepare_process()


def main() -> None:
    """Load, listen, serve; exit with q38's codes."""
    die_with_parent()
    try:
        run(sys.argv[1:])
    except Q38Error as error:
        sys.stderr.write(f"q38: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
