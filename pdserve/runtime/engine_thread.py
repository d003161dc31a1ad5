"""The thread that owns an engine, and its inbox: the only place where the event loop and the engine meet."""

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum

from pdserve.core.errors import StartupError
from pdserve.core.events import EngineLoad
from pdserve.engine.engine import Engine
from pdserve.engine.work import Command, Progress, StepOutcome

log = logging.getLogger(__name__)


class EngineState(Enum):
    """STARTING until the engine is built; BROKEN when building it, or a step, has failed; STOPPED after `stop`."""

    STARTING = "starting"
    RUNNING = "running"
    BROKEN = "broken"
    STOPPED = "stopped"


class EngineThread:
    """Runs an engine in a thread of its own and hands its outcomes to an event loop.

    Before each step the thread takes every command that has been posted. Without work it sleeps until one comes, and
    runs an empty step every `idle_tick_s`, so that the age of the last step tells a live engine from a stuck one.

    Args:
        engine_factory: builds the engine; called in the thread, before that is pinned, so that threads which it starts are not.
        on_outcome: called on the loop with each outcome that has something in it or changes the load, and with each tick's.
        on_progress: called on the loop with prompts to hand over, whenever the step that computes them has done a layer.
        on_broken: called on the loop, once, with what broke the engine or its factory. The last outcome comes before it.
        core: the CPU core to pin this one thread to; None leaves it to the system.
        idle_tick_s: how often an engine without work runs an empty step.

    Attributes:
        state: may be read from any thread, as may `last_step_s`.
        last_step_s: when the last step ended, on this process's monotonic clock; when the thread started, before the first.
    """

    def __init__(
        self,
        engine_factory: Callable[[], Engine],
        on_outcome: Callable[[StepOutcome], None],
        on_progress: Callable[[Sequence[Progress]], None],
        on_broken: Callable[[Exception], None],
        core: int | None = None,
        idle_tick_s: float = 1.0,
    ) -> None:
        self.state = EngineState.STARTING
        self.last_step_s = time.monotonic()
        self._engine_factory = engine_factory
        self._on_outcome = on_outcome
        self._on_progress = on_progress
        self._on_broken = on_broken
        self._core = core
        self._idle_tick_s = idle_tick_s
        # None ends the thread.
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._built: asyncio.Future[Engine]

    def start(self) -> asyncio.Future[Engine]:
        """Start the thread, from the loop that outcomes are to reach.

        Returns: done when the engine is built, with the engine, for what never changes about it: its runner's geometry,
            pool and limits. Fails with what the factory raised, which `on_broken` is told as well.
        """
        self._loop = asyncio.get_running_loop()
        self._built = self._loop.create_future()
        self.last_step_s = time.monotonic()
        self._thread.start()
        return self._built

    def post(self, command: Command) -> None:
        """Give the engine a command; from any thread, in order. Without effect when it is broken or stopped."""
        if self.state in (EngineState.STARTING, EngineState.RUNNING):
            self._inbox.put(command)

    def stop(self, wait_s: float | None = None) -> None:
        """End the thread after the step that it is in, and wait for that. Blocks: on a loop, use a worker thread.

        A thread that hangs is left behind after `wait_s`: it ends with the process.
        """
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(wait_s)
            if self._thread.is_alive():
                log.error("the engine's thread hangs, and is left behind")
        if self.state is not EngineState.BROKEN:
            self.state = EngineState.STOPPED

    def _run(self) -> None:
        try:
            if self._core is not None:
                _check_core(self._core)
            engine = self._engine_factory()
            if self._core is not None:
                # 0 is the calling thread alone.
                os.sched_setaffinity(0, {self._core})
            self.state = EngineState.RUNNING
            self.last_step_s = time.monotonic()
            self._loop.call_soon_threadsafe(self._report_built, engine)
            self._serve(engine)
        except Exception as error:  # noqa: BLE001 - the loop is told, and replaces the worker
            self.state = EngineState.BROKEN
            # A closed loop has nobody left to tell.
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._report_broken, error)

    def _serve(self, engine: Engine) -> None:
        last_load = EngineLoad()
        while True:
            has_work = engine.has_work
            commands = self._take_commands(wait_s=0.0 if has_work else self._idle_tick_s)
            for command in commands:
                if command is None:
                    return
                engine.apply(command)
            outcome = engine.step(self._report_progress)
            self.last_step_s = time.monotonic()
            is_tick = not has_work and not commands
            if is_tick or outcome.load != last_load or _has_events(outcome):
                last_load = outcome.load
                self._loop.call_soon_threadsafe(self._on_outcome, outcome)
            if engine.error is not None:
                raise engine.error

    def _take_commands(self, wait_s: float) -> list[Command | None]:
        """All that has been posted; waits for the first if nothing has."""
        commands: list[Command | None] = []
        try:
            if wait_s > 0:
                commands.append(self._inbox.get(timeout=wait_s))
            while True:
                commands.append(self._inbox.get_nowait())
        except queue.Empty:
            return commands

    def _report_progress(self, progress: Sequence[Progress]) -> None:
        self._loop.call_soon_threadsafe(self._on_progress, progress)

    def _report_built(self, engine: Engine) -> None:
        if not self._built.done():
            self._built.set_result(engine)

    def _report_broken(self, error: Exception) -> None:
        if not self._built.done():
            self._built.set_exception(error)
            # `on_broken` is told too, so nobody has to look at the future.
            self._built.exception()
        self._on_broken(error)


def _check_core(core: int) -> None:
    """Raises StartupError if this process may not use it."""
    usable = sorted(os.sched_getaffinity(0))
    if core not in usable:
        cores = ", ".join(map(str, usable))
        raise StartupError(f"engine.core is {core}, and this process may use {cores}: set one of these, or none")


def _has_events(outcome: StepOutcome) -> bool:
    return bool(outcome.tokens or outcome.granted or outcome.progress or outcome.failed or outcome.stages)
