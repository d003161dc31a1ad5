"""What can be typed after `pdserve`."""

import argparse
import asyncio
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias

from pdserve.cli.arguments import finite, header_text, host_port, prompt_text, server_url, unicode_text
from pdserve.cli.generate import DEFAULT_MAX_TOKENS, run_generate
from pdserve.cli.operations import run_drain, run_scale, run_status, run_undrain
from pdserve.cli.probe import run_probe
from pdserve.cli.up import run_up
from pdserve.core.errors import PdserveError, StartupError
from pdserve.core.events import Role
from pdserve.runtime.process import OneLineParser, add_settings_arguments

Command: TypeAlias = Callable[[argparse.Namespace], Coroutine[Any, Any, int]]

# Added to a signal's number, it is the status that shells know of what the signal has ended.
_SIGNALLED = 128


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="pdserve",
        description="Serves large language models with prefill and decode on separate workers.",
        epilog="`pdserve COMMAND --help` lists the options of a command.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    up = _add(commands, "up", run_up, "start a cluster on this machine, and stop it on Ctrl-C")
    up.add_argument("--port", type=int, help="of the HTTP API (8000)")
    up.add_argument("--prefill", type=int, metavar="N", help="prefill workers (1)")
    up.add_argument("--decode", type=int, metavar="N", help="decode workers (1)")
    up.add_argument("--engine", choices=["torch", "scripted"], help="scripted: everything real but the tokens")
    up.add_argument(
        "--colocated", action="store_true", help="decode workers also prefill: the control for measurements"
    )
    up.add_argument("--model", metavar="FOLDER", help="with config.json, tokenizer.json and safetensors")
    up.add_argument(
        "--address", type=host_port, metavar="HOST:PORT", help="join this Ray cluster instead of starting one"
    )
    up.add_argument("--no-demo", action="store_true", help="do not ask a first question")
    add_settings_arguments(up)

    status = _add(commands, "status", run_status, "list the workers")
    status.add_argument("--json", action="store_true", help="for scripts")

    drain = _add(commands, "drain", run_drain, "let a worker take no new work")
    drain.add_argument("worker", metavar="WORKER", help="as `pdserve status` names it")
    drain.add_argument("--deadline", type=finite, metavar="SECONDS", help="then move what it still holds (30)")

    undrain = _add(commands, "undrain", run_undrain, "let a worker take work again")
    undrain.add_argument("worker", metavar="WORKER")

    scale = _add(commands, "scale", run_scale, "set how many workers of a role run")
    scale.add_argument("role", choices=[str(role) for role in Role])
    scale.add_argument("count", type=int, metavar="N")

    where = "(127.0.0.1:8100, or what PDSERVE_CLUSTER__HOST and PDSERVE_CLUSTER__PORT say)"
    for command in (status, drain, undrain, scale):
        command.add_argument("--controller", type=host_port, metavar="HOST:PORT", help=where)

    generate = _add(commands, "generate", run_generate, "ask one question")
    generate.add_argument("prompt", type=prompt_text)
    generate.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print the answer as it comes, which is the default, or only once it is whole",
    )
    _add_server(generate, "(http://127.0.0.1:8000)")
    limit = f"end the answer there ({DEFAULT_MAX_TOKENS}, or what the model's context has left)"
    generate.add_argument("--max-tokens", type=int, metavar="N", help=limit)
    generate.add_argument("--temperature", type=finite, metavar="T", help="(1.0)")

    probe = _add(commands, "probe", run_probe, "measure many streams at once, through one URL or two")
    _add_server(probe, "of the server itself (http://127.0.0.1:8000)")
    probe.add_argument(
        "--via", type=server_url, metavar="URL", help="the way that users take to it: an ingress, a proxy"
    )
    probe.add_argument("--streams", type=int, default=8, metavar="N", help="at once (8)")
    probe.add_argument("--tokens", type=int, default=64, metavar="N", help="of each answer (64)")
    probe.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="of each prompt (128)")
    probe.add_argument("--json", action="store_true", help="for scripts")
    return parser


def run_command(argv: Sequence[str]) -> int:
    """Returns: the exit status."""
    # What a terminal's encoding has no character for is no reason to fail.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = make_parser().parse_args(argv)
    command: Command = arguments.command
    # Failures are told in one line, below, and a start is told by its progress: no log comes between.
    logging.getLogger("pdserve").addHandler(logging.NullHandler())
    try:
        status = asyncio.run(command(arguments))
        sys.stdout.flush()
    except StartupError as error:
        message = str(error)
    except PdserveError as error:
        message = error.message
    except KeyboardInterrupt:
        return _SIGNALLED + signal.SIGINT
    except BrokenPipeError:
        # Whoever read the output has all that was wanted: `pdserve … | head`.
        _drop_unwritten()
        return _SIGNALLED + signal.SIGPIPE
    except OSError as error:
        _drop_unwritten()
        message = str(error)
    else:
        return status
    sys.stderr.write(f"pdserve: {message}\n")
    return 1


def _drop_unwritten() -> None:
    """What cannot be written now would fail once more, with a traceback, at the interpreter's end."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _add(commands: Any, name: str, command: Command, purpose: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=purpose, description=purpose)
    parser.set_defaults(command=command)
    return parser


def _add_server(parser: argparse.ArgumentParser, url_help: str) -> None:
    """Whom a client of the API asks."""
    parser.add_argument("--url", type=server_url, default="http://127.0.0.1:8000", help=url_help)
    parser.add_argument("--model", type=unicode_text, default="", help="(the first that the server names)")
    parser.add_argument("--api-key", type=header_text, metavar="KEY", help="if the server wants one")
