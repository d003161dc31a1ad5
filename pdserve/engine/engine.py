"""An engine: a scheduler that decides and a runner that computes. One thread owns it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.interfaces import ModelRunner
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.settings import SchedulerSettings
from pdserve.engine.work import Command, Progress, StepOutcome


class Engine:
    """Commands in by `apply`, outcomes out by `step`: plan, run, commit.

    Attributes:
        max_context_tokens: of a sequence, prompt and output.
        error: what broke it, once a step could not be run. A broken engine is replaced, never used again: nobody knows
            what is in its pool.
    """

    def __init__(
        self,
        runner: ModelRunner,
        settings: SchedulerSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = settings or SchedulerSettings()
        self.runner = runner
        self.max_context_tokens = min(
            settings.max_context_tokens or runner.max_context_tokens, runner.max_context_tokens
        )
        self.scheduler = Scheduler(
            BlockManager(runner.pool.num_blocks), runner.geometry, self.max_context_tokens, settings, clock
        )
        self.error: Exception | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or tell anything before another command comes."""
        return self.error is None and self.scheduler.has_work

    def apply(self, command: Command) -> None:
        """Take a command before the next step.

        Raises:
            IllegalTransition: a defect of the caller; see `Scheduler.apply`.
        """
        self.scheduler.apply(command)

    def step(self, on_progress: Callable[[Sequence[Progress]], None] | None = None) -> StepOutcome:
        """Run a step, an empty one if there is nothing to do, and tell what happened.

        If the runner raises, every attempt in the step has failed and `error` is set.

        Args:
            on_progress: may be called in the middle of the step, with the prompts to hand over of which some layers are
                computed.
        Raises:
            PdserveError: engine_failed: the engine is broken already.
        """
        if self.error is not None:
            raise _engine_failed(self.error)
        plan = self.scheduler.plan()
        on_layers = None
        if on_progress is not None and (handed_over := self.scheduler.handed_over(plan)):
            on_layers = _progress_teller(handed_over, on_progress)
        try:
            sampled = self.runner.run(plan.slices, plan.copies, on_layers) if plan else []
            return self.scheduler.commit(plan, sampled)
        except Exception as error:  # noqa: BLE001 - reported for each attempt, and kept
            self.error = error
            return self.scheduler.fail(plan, _engine_failed(error))


def _progress_teller(
    at_end: Sequence[Progress], on_progress: Callable[[Sequence[Progress]], None]
) -> Callable[[int], None]:
    def tell(num_layers: int) -> None:
        on_progress([replace(progress, num_layers=num_layers) for progress in at_end])

    return tell


def _engine_failed(error: Exception) -> PdserveError:
    return PdserveError(ErrorCode.engine_failed, f"the engine could not run a step: {type(error).__name__}: {error}")
