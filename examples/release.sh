#!/usr/bin/env bash
# From a recipe to a sealed and checked release with a model card, and the proof that the recipe gives it again.
# Usage: examples/release.sh [DIR] [RECIPE]     DIR/release is the result; the same command goes on after a kill.
set -euo pipefail
dir=$(realpath -m "${1:-tiny-release}")
recipe=${2:-tiny}
cd "$(dirname "$0")/.."
. scripts/setup.sh quant,serve

q38 run "$recipe" --workdir "$dir/run"
q38 release build "$dir/run" -o "$dir/release"
q38 release check "$dir/release" --full
q38 release card "$dir/release" -o "$dir/card.md"

# Once more from the start: the same tensors, or this ends with exit code 1.
q38 run "$recipe" --workdir "$dir/again"
q38 release build "$dir/again" -o "$dir/release-again"
q38 release diff "$dir/release" "$dir/release-again"
