"""A worker that follows a script: ``python scripted.py NAME LOG [FAULT]``; it writes its turns into LOG."""

from __future__ import annotations

import json
import os
import sys
import time

NAME, LOG = sys.argv[1:3]
FAULT = sys.argv[3] if len(sys.argv) > 3 else ""
SPEED = {"fast": 0.01, "slow": 0.02}.get(NAME, 0.02)

for runs, line in enumerate(sys.stdin):
    order = json.loads(line)
    if FAULT == "dies" and runs == 4:
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(3)
    if FAULT == "hangs":
        time.sleep(3600)
    if FAULT == "refuses":
        answer = {"ok": False, "error": "ValueError: no such weights"}
    elif FAULT == "babbles" and order["do"] == "run":
        answer = {"ok": True, "answers": [{"sent": "soon"}], "memory_mb": 1.0}
    elif order["do"] == "load":
        answer = {"ok": True, "facts": {"version": f"{NAME} 1", "weights": "none"}, "memory_mb": 1.0}
    else:
        with open(LOG, "a") as log:
            log.write(json.dumps([NAME, order["mode"], order["prompts"], order["max_tokens"]]) + "\n")
        tokens = list(range(order["max_tokens"]))
        chunks = [[SPEED * (i + 1), 1] for i in tokens]
        answers = [{"sent": 0.0, "chunks": chunks, "tokens": tokens} for _ in order["prompts"]]
        answer = {"ok": True, "answers": answers, "memory_mb": 7.5}
    print(json.dumps(answer), flush=True)
