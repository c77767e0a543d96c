"""``python -m tests.drills.beside_load [N] COMMAND...``: run a command beside N (8) processes that keep CPUs busy.

Exit status is the command's. The busy ones are a process group of their own and end with it, whatever happens.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

# Ends by itself when this process is gone, also by a SIGKILL.
_BUSY = """
import os, sys
for _ in range(int(sys.argv[1]) - 1):
    if os.fork() == 0:
        break
while os.getppid() != 1:
    for _ in range(1_000_000):
        pass
"""


def main(arguments: list[str]) -> int:
    count, command = (int(arguments[0]), arguments[1:]) if arguments[0].isdigit() else (8, arguments)
    busy = subprocess.Popen([sys.executable, "-c", _BUSY, str(count)], start_new_session=True)
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        os.killpg(busy.pid, signal.SIGKILL)
        busy.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
