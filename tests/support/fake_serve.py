"""As ``medusa-gateway serve`` over a :class:`FakeDecoder`: a program to be measured that starts within a second."""

from __future__ import annotations

import argparse
import logging
import os

from gateway.http.server import bind, run_server
from gateway.serving.call import ServedModel
from gateway.serving.controller import Controller
from gateway.serving.state import GatewayState
from policy.runtime import PolicyRuntime
from telemetry.logs import configure_logging
from telemetry.service import Telemetry
from tests.support.fakes import FakeDecoder, FakeTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--log-level", default="warning")
    parser.add_argument("--fail")
    asked, _ = parser.parse_known_args()
    if asked.fail:
        raise SystemExit(asked.fail)
    configure_logging("json", asked.log_level)
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    with open(asked.policy, "rb") as policy:
        controller = Controller(PolicyRuntime.from_text(policy.read()))
    telemetry = Telemetry.from_environment(os.environ, version="1", instance="measured")
    name = asked.served_model_name
    served = ServedModel(FakeDecoder(name=name), FakeTokenizer())
    state = GatewayState.create({name: served}, controller=controller, telemetry=telemetry)
    try:
        run_server(state, bind("127.0.0.1", 0))
    finally:
        telemetry.shutdown()


if __name__ == "__main__":
    main()
