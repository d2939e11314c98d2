"""The child process of `q38 serve fleet`: `python -m q38.serving.fleet_router SETTINGS-AS-JSON`."""

from __future__ import annotations

import json
import sys

from q38.base import settings
from q38.serving.watchdog import die_with_parent_by_process


def main() -> None:
    """Route until SIGTERM. The API key comes from the environment: a command line is visible to every user."""
    die_with_parent_by_process()
    from sglang_router.launch_router import launch_router
    from sglang_router.router_args import RouterArgs

    key = settings.load().api_key
    launch_router(RouterArgs(**json.loads(sys.argv[1]), api_key=None if key == "none" else key))


if __name__ == "__main__":
    main()
