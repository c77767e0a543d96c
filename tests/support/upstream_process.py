"""A second gateway in a process of its own, over a :class:`FakeDecoder` that its test steers: a real upstream.

Run as a program it serves until it is told to stop; orders are lines on its standard input.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from tests.support.fakes import PATIENCE_S, FakeDecoder, FakeTokenizer
from tests.support.paths import ROOT


class UpstreamProcess:
    """The test's side. ``hold`` makes every sequence wait before a step, so that a kill in mid-stream is no race."""

    def __init__(self, port: int = 0, name: str = "fake-model") -> None:
        command = [sys.executable, "-m", "tests.support.upstream_process", str(port), name]
        folder = ROOT
        self.process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http://"), "the upstream did not start"

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def order(self, text: str) -> None:
        """Returns when the order was carried out."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(text + "\n")
        assert self.process.stdout.readline().strip() == "done"

    def aborted(self) -> None:
        """Waits until a sequence was aborted, and none runs."""
        self.order("wait-aborted")

    def stop_running(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


def main(port: int, name: str) -> None:
    from gateway.http.server import GatewayServer, bind, url_of
    from gateway.serving.call import ServedModel
    from gateway.serving.state import GatewayState
    from gateway.settings import GatewaySettings

    decoder = FakeDecoder(name=name, natural_length=120)
    settings = GatewaySettings(max_concurrent=4, max_queue=4)
    state = GatewayState.create({name: ServedModel(decoder, FakeTokenizer())}, settings)
    bound = bind("127.0.0.1", port)

    def orders() -> None:
        try:
            for line in sys.stdin:
                word, *arguments = line.split()
                if word == "hold":
                    decoder.hold(at_step=int(arguments[0]))
                elif word == "release":
                    decoder.release()
                elif word == "fail":
                    decoder.fail(at_step=int(arguments[0]) if arguments else None)
                elif word == "wait-aborted":
                    decoder.wait_until(lambda fake: bool(fake.aborted) and not fake._running)
                print("done", flush=True)
        finally:
            # The test is gone, or an order could not be carried out.
            os._exit(1)

    server = GatewayServer(state, on_ready=lambda: print(url_of(bound), flush=True))
    threading.Thread(target=orders, daemon=True).start()
    server.run(sockets=[bound])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
