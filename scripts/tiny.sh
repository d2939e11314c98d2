#!/usr/bin/env bash
# Install q38 into .venv and take a tiny model from checkpoint to server. Usage: scripts/tiny.sh [WORKDIR]
set -euo pipefail
workdir=$(realpath -m "${1:-tiny-run}")
cd "$(dirname "$0")/.."
. scripts/setup.sh quant,serve
exec q38 run recipes/tiny.yaml --workdir "$workdir"
