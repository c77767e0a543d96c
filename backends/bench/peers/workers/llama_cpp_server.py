"""llama.cpp's OpenAI server: ``python llama_cpp_server.py OPTIONS``, options as :mod:`llama_cpp` takes them, in JSON.

Prints its address, and serves until its standard input ends.
"""

from __future__ import annotations

import json
import os
import sys

import xllamacpp  # type: ignore[import-not-found]
from llama_cpp import make_params  # type: ignore[import-not-found]  # the adapter beside this file
from main import end_with_parent  # type: ignore[import-not-found]

end_with_parent()

server = xllamacpp.Server(make_params(json.loads(sys.argv[1])))
print(server.listening_address, flush=True)
sys.stdin.read()
os._exit(0)
