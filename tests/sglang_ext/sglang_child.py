"""Runs the code that tests send, in a process that has imported SGLang. See conftest.Child."""

import json
import os
import sys

from q38.sglang_ext.cpu.prepare import prepare

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what SGLang prints must not mix with the answers
prepare()

names: dict[str, object] = {}
for line in sys.stdin:
    try:
        exec(json.loads(line), names)
        answer = {"result": names.get("result")}
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=answers, flush=True)
