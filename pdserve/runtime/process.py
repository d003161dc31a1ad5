"""What the main of every process does: settings, logs, signals, and one line for what a person can fix."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pdserve.config import Settings, assign, load_settings
from pdserve.core.errors import StartupError
from pdserve.telemetry.logs import configure_logs


class OneLineParser(argparse.ArgumentParser):
    """Wrong usage is one line that says where to read on."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Nothing is unknown: a command refuses what it does not know itself, and so says where to read of it."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, []

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_settings_arguments(parser: argparse.ArgumentParser) -> None:
    """`--config FILE` and `--set section.field=value`, for every command that starts a process."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML")
    parser.add_argument(
        "--set",
        dest="assignments",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="one setting; may be repeated",
    )


def settings_from(arguments: argparse.Namespace, overrides: dict[str, Any] | None = None) -> Settings:
    """The settings that a command line asks for; `overrides` win.

    Raises:
        StartupError: lists every bad or unknown value.
    """
    values: dict[str, Any] = {}
    for assignment in arguments.assignments:
        path, equals, text = assignment.partition("=")
        if not equals or "." not in path or path.endswith("."):
            raise StartupError(f"--set takes SECTION.FIELD=VALUE, not {assignment!r}")
        assign(values, path.split("."), text)
    for section, fields in (overrides or {}).items():
        values.setdefault(section, {}).update(fields)
    return load_settings(arguments.config, overrides=values)


def run_process(
    name: str, main: Callable[[Settings, asyncio.Event], Coroutine[Any, Any, None]], argv: Sequence[str] | None = None
) -> int:
    """Parse `argv`, then run `main(settings, stop)` on a fresh event loop.

    The first SIGTERM or SIGINT sets `stop`; a second one ends the process at once.

    Returns: the exit status. A StartupError prints its message and gives 1.
    """
    parser = OneLineParser(prog=f"python -m services.{name}")
    add_settings_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        settings = settings_from(arguments)
        configure_logs(name, settings.log)
        asyncio.run(_run(main, settings))
    except StartupError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 1
    return 0


async def _run(main: Callable[[Settings, asyncio.Event], Coroutine[Any, Any, None]], settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def begin_stop() -> None:
        stop.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, begin_stop)
    await main(settings, stop)
