"""What `helm test` runs in the gateway's own image: health, readiness, the models and one short answer.

Called with the service's URL; an API key, if one is needed, is in MEDUSA_API_KEY.
"""

import json
import os
import sys
import urllib.error
import urllib.request

url = sys.argv[1]
headers = {"Content-Type": "application/json"}
if key := os.environ.get("MEDUSA_API_KEY"):
    headers["Authorization"] = f"Bearer {key}"


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        hint = " (tests.apiKeySecret names the key to ask with)" if error.code in (401, 403) else ""
        sys.exit(f"{path}: {error.code}{hint}: {error.read(2000).decode('utf-8', 'replace')}")
    except OSError as error:
        sys.exit(f"{path}: {error}")


ask("/healthz")
ask("/readyz")
models = [model["id"] for model in ask("/v1/models")["data"]]
if not models:
    sys.exit("/v1/models: no model is served")
for model in models:
    answer = ask("/v1/completions", {"model": model, "prompt": "Hello", "max_tokens": 4})
    if not answer["usage"]["completion_tokens"]:
        sys.exit(f"{model}: an answer without a token: {answer}")
    print(f"{model}: {answer['usage']['completion_tokens']} tokens")
