"""``medusa-gateway serve``: load a model and its heads, and serve them."""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.engine.options import ABOUT, EngineOptions
from gateway.commands import serve_telemetry
from gateway.commands.auth_options import add_options, open_access, seconds
from gateway.commands.engine_options import add_engine_options, given_options, no_such_folder, whole
from gateway.commands.errors import CommandError
from gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from backends.cost.stores import CostStore
    from gateway.routing.spec import BackendsSpec, EngineSpec
    from gateway.serving.controller import Controller
    from gateway.serving.targets import Backends

DEFAULT_PORT = 8080


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model with the OpenAI API. Without --model, the demo model with its trained heads.",
    )
    own = GatewaySettings()
    add = parser.add_argument_group("model").add_argument
    add_engine_options(add, "--model", "--heads", "--device", "--dtype", "--quantize")
    add(
        "--backends",
        metavar="FILE",
        help="several models, engines and upstreams, instead of the options above (docs/backends.md)",
    )
    add_engine_options(add, "--remeasure", "--served-model-name")

    add = parser.add_argument_group("limits").add_argument
    add_engine_options(add, "--max-model-len", "--max-running")
    waiting = "sequences that may wait beside them; default: %(default)s"
    add("--max-queue", type=whole(0, 2**31 - 1), metavar="N", default=own.max_queue, help=waiting)
    add_engine_options(add, "--kv-tokens")
    cap = "cap of an answer whose client sets none; default: %(default)s"
    add("--default-max-tokens", type=whole(1, 2**31 - 1), metavar="N", default=own.default_max_tokens, help=cap)
    add("--deadline", type=seconds, metavar="SECONDS", help="cut every answer after this long; default: never")
    add(
        "--max-body-bytes",
        type=whole(1, 2**31 - 1),
        metavar="BYTES",
        default=own.max_body_bytes,
        help="largest request; default: %(default)s",
    )

    add = parser.add_argument_group("policy").add_argument
    add("--policy", metavar="FILE", help="decoding policy, watched for edits; default: the one that ships")
    add("--classifier", type=Path, metavar="FILE", help="a prompt classifier of your own; default: the one that ships")
    add(
        "--redis-url",
        metavar="URL",
        help="where replicas share statistics (better given as MEDUSA_REDIS_URL, which other users can't see); "
        "default: an embedded server; 'memory': nowhere",
    )

    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="default: %(default)s")
    add("--port", type=whole(0, 65535), default=DEFAULT_PORT, help="0 picks a free one; default: %(default)s")
    patience = "what streams get to finish on SIGTERM; default: %(default)g"
    add("--drain-timeout", type=seconds, metavar="SECONDS", default=own.drain_timeout_s, help=patience)
    add("--access-log", action="store_true", help="log every request")
    add_options(parser, own)
    serve_telemetry.add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from gateway.http.server import bind, run_server
    from gateway.http.starting import Starting
    from gateway.serving.state import GatewayState

    serve_telemetry.configure_logs(args)
    access = open_access(args)
    if access.keys is None and not access.local:
        logging.getLogger("gateway").warning("no API keys: everybody who can reach this may use and administer it")
    # A broken policy and a mistyped URL, like a taken port, should not cost the loading of a model to find out.
    controller = _controller(args)
    spec = None if args.backends is None else _read_backends(args, controller)
    telemetry = serve_telemetry.open_telemetry(args, controller.statistics.replica)
    # Bound before the model is loaded: a taken port should not cost a minute to find out.
    wanted = [(args.host, args.port), *([(args.admin_host, args.admin_port)] if args.admin_port else [])]
    with ExitStack() as held:
        try:
            sockets = [held.enter_context(bind(host, port)) for host, port in wanted]
        except OSError as error:
            places = " and ".join(f"{host}:{port}" for host, port in wanted)
            raise CommandError(f"can't listen on {places}: {error.strerror or error}") from error
        starting = Starting(sockets)
        held.callback(starting.close)
        starting.open()
        backends = _open_backends(args, spec) if spec is not None else _open_one(args)
        try:
            settings = GatewaySettings(
                max_concurrent=args.max_running or sum(each.max_running for each in backends.all),
                max_queue=args.max_queue,
                default_max_tokens=args.default_max_tokens,
                max_body_bytes=args.max_body_bytes,
                deadline_s=args.deadline,
                drain_timeout_s=args.drain_timeout,
                max_header_bytes=args.max_header_bytes,
                header_timeout_s=args.header_timeout,
                body_timeout_s=args.body_timeout,
                keep_alive_s=args.keep_alive,
                cors_origins=tuple(args.cors_origin),
            )
            state = GatewayState.create(backends, settings, controller, telemetry, access)
            run_server(state, *sockets, on_start=starting.close, access_log=args.access_log, bounded_exit=True)
        finally:
            telemetry.shutdown()
            for engine in backends.engines:
                engine.served.decoder.close()
    return 0


def _controller(args: argparse.Namespace) -> Controller:
    from gateway.classifier import ArtifactError, PromptClassifier
    from gateway.serving.controller import Controller
    from gateway.serving.statistics_store import store_opener
    from policy.config.problems import PolicyError
    from policy.runtime import PolicyRuntime

    now = time.time()
    try:
        policy = PolicyRuntime.open(Path(args.policy), now) if args.policy else PolicyRuntime.embedded(now)
    except PolicyError as error:
        raise CommandError(f"the policy is refused: {error}") from None
    try:
        open_store = store_opener(_redis_url(args, os.environ))
    except ValueError as error:
        raise CommandError(f"--redis-url: {error}") from None
    try:
        classifier = PromptClassifier.load(args.classifier)
    except ArtifactError as error:
        if args.classifier is not None:  # asked for by name, so not done without
            raise CommandError(f"--classifier: {error}") from None
        logging.getLogger("gateway").error("prompts stay unclassified: %s", error)
        return Controller(policy, open_store=open_store)
    return Controller(policy, classify=lambda prompt: classifier.classify(prompt).label, open_store=open_store)


def _redis_url(args: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
    """The flag, else the environment; a password may come apart from the URL, as Kubernetes keeps it in a Secret."""
    from policy.shared.redis_client import with_password

    url = args.redis_url or environ.get("MEDUSA_REDIS_URL")
    password = environ.get("MEDUSA_REDIS_PASSWORD")
    return url if url in (None, "memory") or not password else with_password(url, password)


def _read_backends(args: argparse.Namespace, controller: Controller) -> BackendsSpec:
    from gateway.routing.backends_file import parse_backends
    from gateway.serving.startup import unknown_classes
    from policy.config.problems import ConfigError

    one, usual = given_options(args), EngineOptions(measure_anew=args.remeasure)
    for name, about in ABOUT.items():
        if getattr(one, name) != getattr(usual, name):
            raise CommandError(f"{about.flag} and --backends exclude each other: say it in {args.backends}.")
    try:
        spec = parse_backends(Path(args.backends).read_bytes(), args.backends)
    except ConfigError as error:
        raise CommandError(f"the backends file is refused: {error}") from None
    if unknown := unknown_classes(spec, controller.known_classes):
        raise CommandError(
            f"{args.backends}: no prompt is ever of class {', '.join(unknown)}; the policy's classes are "
            f"{', '.join(controller.known_classes)}."
        )
    return spec


def _open_backends(args: argparse.Namespace, spec: BackendsSpec) -> Backends:
    from gateway.serving.startup import open_backends
    from gateway.upstream.api_key import ApiKeyError

    def open_engine(engine: EngineSpec) -> Any:
        return _open_engine(args, replace(engine.options, served_name=engine.serves))

    try:
        return open_backends(spec, args.max_queue, open_engine)
    except ApiKeyError as error:
        raise CommandError(f"{args.backends}: {error}") from None


def _open_one(args: argparse.Namespace) -> Backends:
    """The simple case: one engine, which is also the name of its backend."""
    from gateway.admission import Places
    from gateway.serving.call import ServedModel
    from gateway.serving.targets import Backends, EngineBackend

    opened = _open_engine(args, given_options(args))
    decoder = opened.decoder
    places = Places((args.max_running or decoder.load().max_running) + args.max_queue)
    engine = EngineBackend(decoder.info.name, ServedModel(decoder, opened.tokenizer, opened.grammars), places)
    return Backends([engine], frozenset([engine.model]))


def _open_engine(args: argparse.Namespace, options: EngineOptions) -> Any:
    for name in (options.model, options.heads):
        if name is not None and (problem := no_such_folder(name)):
            # Of a backends file; flags are looked at when they are read.
            raise CommandError(f"{args.backends or 'the command line'}: {problem}")
    from backends.engine.start_stages import StartStages, tell

    stages = StartStages()
    tell(f"loading {options.model or 'the demo model'} (a few seconds, most of them for torch and transformers)")
    try:
        # The only way from here to torch, taken when a model is really to be loaded.
        with stages.stage("importing"):
            from backends.engine.loading import open_engine
    except ImportError as error:
        raise CommandError(f"the engine can't be imported: {error}") from error
    try:
        anew = args.remeasure or os.environ.get("MEDUSA_REMEASURE", "") not in ("", "0")
        return open_engine(replace(options, measure_anew=anew), _cost_stores(args), stages)
    except (OSError, ValueError) as error:
        raise CommandError(f"can't load {options.model or 'the demo model'}: {error}") from error


def _cost_stores(args: argparse.Namespace) -> list[CostStore]:
    """Where cost tables are kept: with this user, and in the Redis that was named, for machines of the same kind."""
    from backends.cost.stores import FolderStore
    from policy.shared.cost_tables import RedisCostStore
    from policy.shared.redis_client import parse_redis_url

    url = _redis_url(args, os.environ)
    shared = [] if url in (None, "memory") else [RedisCostStore(parse_redis_url(url))]
    return [FolderStore.of_user(), *shared]
