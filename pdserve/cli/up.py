"""`pdserve up`: a cluster on this machine, from its checks to its first answer, until Ctrl-C."""

import argparse
import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from pdserve.cli.checks import check_memory, check_model, check_ports, check_roles
from pdserve.cli.generate import ask
from pdserve.cli.machine import Machine
from pdserve.config import ClusterConfig, Settings
from pdserve.runtime.process import settings_from
from pdserve.wire.server import format_address

DEMO_PROMPT = "What is the capital of France?"
_DEMO_TOKENS = 64

# Unix sockets have paths of 107 characters at most, and Ray needs about 75 of them.
_LONGEST_TEMP_DIR = 16


async def run_up(arguments: argparse.Namespace) -> int:
    """Start, serve until a signal, stop.

    Raises:
        StartupError: a check failed, or a process could not start.
    """
    settings = settings_from(arguments, overrides_of(arguments))
    check(settings)
    run_dir = Path(tempfile.mkdtemp(prefix="pdserve-", dir=_temp_dir()))
    machine = Machine(settings, settings_arguments(arguments), run_dir)
    serving = asyncio.ensure_future(_run(machine, settings, demo=not arguments.no_demo))
    _catch_signals(serving, machine)
    try:
        await serving
    except asyncio.CancelledError:
        _say("stopping")
        await machine.stop()
        await asyncio.to_thread(shutil.rmtree, run_dir)
    except BaseException:
        await machine.stop()
        raise
    return 0


def overrides_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that are shorthands of settings, as settings."""
    overrides: dict[str, dict[str, Any]] = {"frontend": {}, "cluster": {}, "engine": {}, "model": {}, "worker": {}}
    if arguments.port is not None:
        overrides["frontend"]["port"] = arguments.port
    if arguments.colocated:
        overrides["worker"]["colocated"] = True
        overrides["cluster"]["prefill"] = 0
    for role in ("prefill", "decode"):
        if getattr(arguments, role) is not None:
            overrides["cluster"][role] = getattr(arguments, role)
    if arguments.engine is not None:
        overrides["engine"]["kind"] = arguments.engine
    if arguments.model is not None:
        overrides["model"] = {"path": arguments.model, "name": Path(arguments.model).resolve().name}
    if arguments.address is not None:
        overrides["cluster"]["address"] = arguments.address
    return {section: fields for section, fields in overrides.items() if fields}


def settings_arguments(arguments: argparse.Namespace) -> list[str]:
    """The same settings for the processes that it starts."""
    words = ["--config", str(arguments.config)] if arguments.config else []
    for assignment in arguments.assignments:
        words += ["--set", assignment]
    for section, fields in overrides_of(arguments).items():
        for name, value in fields.items():
            words += ["--set", f"{section}.{name}={value}"]
    return words


def check(settings: Settings) -> None:
    """Raises StartupError for what would fail later, and less clearly."""
    if not settings.cluster.address:
        check_roles(settings)
    check_ports(settings)
    check_model(settings.model.path)
    if not settings.cluster.address:
        check_memory(settings)


async def _run(machine: Machine, settings: Settings, demo: bool) -> None:
    begun_s = time.monotonic()
    _say(f"logs: {machine.run_dir}")
    for line in sharing_notes(settings, len(os.sched_getaffinity(0))):
        _say(line)
    await machine.make_model(_say)
    await machine.start(_say)
    _say(f"{settings.model.name} serves after {time.monotonic() - begun_s:.1f} s")
    if demo:
        await _show_answer(machine.url, demo_note(settings))
    messages = [{"role": "user", "content": "Hello"}]
    # A small model is soon lost at OpenAI's default temperature.
    body = {"model": settings.model.name, "messages": messages, "temperature": 0, "stream": True}
    quoted = shlex.quote(json.dumps(body))
    print(f"\ntry: curl -N {machine.url}/v1/chat/completions -H 'Content-Type: application/json' -d {quoted}")
    for line in controller_notes(settings):
        print(line)
    print(f"ready {machine.url}", flush=True)
    await machine.supervise(_say)


def sharing_notes(settings: Settings, cores: int) -> list[str]:
    """What a person should know of how workers share this machine."""
    workers = settings.cluster.prefill + settings.cluster.decode
    if settings.engine.kind == "scripted" or settings.engine.device != "cpu" or workers <= cores:
        return []
    return [f"{workers} workers share {cores} cores: each engine has a core, some of them the same one"]


def controller_notes(settings: Settings) -> list[str]:
    """How other commands find a controller that is not where they look by themselves."""
    usual = ClusterConfig()
    host, port = settings.cluster.host, settings.cluster.port
    if (host, port) == (usual.host, usual.port):
        return []
    return [f"its workers: pdserve status --controller {format_address(host, port)}"]


def demo_note(settings: Settings) -> str:
    """What a person should know of the first answer."""
    return " (scripted: the words mean nothing)" if settings.engine.kind == "scripted" else ""


async def _show_answer(url: str, note: str) -> None:
    _say(f"> {DEMO_PROMPT}")
    begun_s = time.monotonic()
    ttft_s = 0.0
    # The first request of a torch engine compiles and warms up what it uses.
    async with aclosing(ask(url, DEMO_PROMPT, stream=True, max_tokens=_DEMO_TOKENS, temperature=0)) as pieces:
        async for piece in pieces:
            ttft_s = ttft_s or time.monotonic() - begun_s
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    print()
    _say(f"first token after {1000 * ttft_s:.0f} ms{note}")


def _catch_signals(serving: "asyncio.Future[None]", machine: Machine) -> None:
    """The first signal stops in order, the second one at once."""
    loop = asyncio.get_running_loop()

    def begin_stop() -> None:
        if not serving.cancel():
            machine.hurry()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, begin_stop)


def _temp_dir() -> str:
    found = tempfile.gettempdir()
    return found if len(found) <= _LONGEST_TEMP_DIR else "/tmp"


def _say(line: str) -> None:
    print(line, flush=True)
