#!/usr/bin/env bash
# On a machine with the GPU, about 3 minutes: kernel tests, tuned decode geometry, the roofline table, memory and race checks.
#   bash benchmarks/kernels_release.sh OUT     writes OUT/{tests,others,sanitizer}.txt, OUT/tuned/<GPU>.json, OUT/bench.json
set -u
out=$1
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root" || exit 1
export PYTHONUNBUFFERED=1
timeout 90 python3 -m pytest tests/gpu/test_kernels_gpu.py -q -p no:cacheprovider > "$out/tests.txt" 2>&1
tail -3 "$out/tests.txt"
timeout 60 python3 - "$out" <<'PY'
import sys
from pathlib import Path
from q38.measure.kernels import tune_model_kernels

for unit in tune_model_kernels(None, Path(sys.argv[1]) / "tuned", kernels=("decode",))["results"]:
    print("tuned", unit["kernel"], unit["tokens"], unit["default"]["us"], unit["best"] and unit["best"]["us"])
PY
timeout 100 python3 - "$out" <<'PY'
import json, sys
from pathlib import Path
from q38.measure.kernels import bench_model_kernels

result = bench_model_kernels(None)
Path(sys.argv[1], "bench.json").write_text(json.dumps(result, indent=1))
print(result["limits"])
for r in result["results"]:
    print(f"{r['kernel']:8} {r['case']:48} {r['tokens']:7} {r['us']:10.2f} us {r['rate'] / (1e9 if r['unit'] == 'B' else 1e12):9.1f} {r['fraction']:.2f}")
PY
for tool in "memcheck --report-api-errors no" racecheck; do
  timeout 60 compute-sanitizer --tool $tool python3 benchmarks/kernels_profile.py "1 4 16" >> "$out/sanitizer.txt" 2>&1
  echo "$tool: $(grep -a 'ERROR SUMMARY\|RACECHECK SUMMARY' "$out/sanitizer.txt" | tail -1)"
done
