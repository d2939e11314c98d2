#!/usr/bin/env bash
# Install q38 with its developer tools into .venv and run every check. Usage: scripts/test.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh quant,serve,dev
. scripts/sglang.sh
ruff check q38 tests benchmarks
ruff format --check q38 tests benchmarks
mypy
lint-imports
python -m q38.cli.docs --check
# Two workers: most tests wait for one thread. A file stays on one of them, with what it shares.
exec python -m pytest -n 2 --dist loadfile "$@"
