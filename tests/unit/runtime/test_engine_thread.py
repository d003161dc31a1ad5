"""The engine's thread: commands in, outcomes to the loop, life shown when idle, every error told."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from pdserve.core.errors import ErrorCode, StartupError
from pdserve.core.ids import AttemptKey, GroupId
from pdserve.core.sampling import SamplingParams
from pdserve.engine.engine import Engine
from pdserve.engine.scripted import Script, ScriptedRunner, scripted_answer
from pdserve.engine.work import BlockCopy, Group, Prefill, Progress, Sampled, SequenceSlice, StepOutcome, Stop
from pdserve.runtime.engine_thread import EngineState, EngineThread

DEADLINE_S = 20.0


def make_engine() -> Engine:
    return Engine(ScriptedRunner(100))


def make_group(counter: int, max_tokens: int = 5) -> Group:
    return Group(
        key=AttemptKey(GroupId(1, counter), 1),
        siblings=(0,),
        token_ids=np.arange(counter, counter + 20, dtype=np.int32),
        prompt_tokens=20,
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        seed=0,
    )


class Observer:
    """Collects what the thread tells its loop, and checks that it is told there."""

    def __init__(self) -> None:
        self.outcomes: list[StepOutcome] = []
        self.progress: list[Progress] = []
        self.errors: list[Exception] = []
        self.loop_thread = threading.get_ident()

    def on_outcome(self, outcome: StepOutcome) -> None:
        assert threading.get_ident() == self.loop_thread
        self.outcomes.append(outcome)

    def on_progress(self, progress: Sequence[Progress]) -> None:
        assert threading.get_ident() == self.loop_thread
        self.progress += progress

    def on_broken(self, error: Exception) -> None:
        assert threading.get_ident() == self.loop_thread
        self.errors.append(error)

    def answers(self) -> dict[AttemptKey, list[int]]:
        answers: dict[AttemptKey, list[int]] = {}
        for outcome in self.outcomes:
            for token in outcome.tokens:
                answers.setdefault(token.key, []).append(token.token_id)
        return answers


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def running(
    factory: Callable[[], Engine] = make_engine, *, core: int | None = None, idle_tick_s: float = 1.0
) -> AsyncIterator[tuple[EngineThread, Observer]]:
    observer = Observer()
    thread = EngineThread(
        factory, observer.on_outcome, observer.on_progress, observer.on_broken, core=core, idle_tick_s=idle_tick_s
    )
    try:
        yield thread, observer
    finally:
        await asyncio.to_thread(thread.stop)


@pytest.mark.asyncio
async def test_commands_become_answers() -> None:
    async with running() as (thread, observer):
        assert thread.state is EngineState.STARTING
        engine = await thread.start()
        assert thread.state is EngineState.RUNNING
        assert engine.runner.pool.num_blocks == 100
        groups = [make_group(counter) for counter in range(4)]
        for group in groups:
            thread.post(Prefill(group, then_decode=True))
        await until(lambda: sum(map(len, observer.answers().values())) == 20)
        assert observer.answers() == {g.key: scripted_answer(g.token_ids, g.params) for g in groups}
    assert thread.state is EngineState.STOPPED
    assert not engine.scheduler.attempts


@pytest.mark.asyncio
async def test_layers_of_a_prompt_to_hand_over_are_told_before_its_step_ends() -> None:
    async with running() as (thread, observer):
        await thread.start()
        mine, other = make_group(1), make_group(2)
        thread.post(Prefill(other, then_decode=True))
        thread.post(Prefill(mine))
        await until(lambda: {mine.key, other.key} <= observer.answers().keys())
        assert [(told.key, told.computed_tokens, told.num_layers) for told in observer.progress] == [
            (mine.key, 20, 1),
            (mine.key, 20, 2),
        ]


@pytest.mark.asyncio
async def test_commands_may_come_before_the_engine_is_built_and_from_any_thread() -> None:
    may_build = threading.Event()

    def slow_factory() -> Engine:
        may_build.wait(DEADLINE_S)
        return make_engine()

    async with running(slow_factory) as (thread, observer):
        built = thread.start()
        await asyncio.to_thread(thread.post, Prefill(make_group(1), then_decode=True))
        assert not built.done()
        assert thread.state is EngineState.STARTING
        may_build.set()
        await until(lambda: len(observer.answers().get(make_group(1).key, [])) == 5)


@pytest.mark.asyncio
async def test_each_step_is_one_outcome() -> None:
    async with running() as (thread, observer):
        await thread.start()
        thread.post(Prefill(make_group(1, max_tokens=30), then_decode=True))
        await until(lambda: len(observer.answers().get(make_group(1).key, [])) == 30)
        assert [len(outcome.tokens) for outcome in observer.outcomes if outcome.tokens] == [1] * 30


@pytest.mark.asyncio
async def test_a_stop_is_heard_before_the_next_step() -> None:
    async with running(lambda: Engine(ScriptedRunner(100, Script(step_s=0.01)))) as (thread, observer):
        engine = await thread.start()
        thread.post(Prefill(make_group(1, max_tokens=1500), then_decode=True))
        await until(lambda: bool(observer.answers()))
        thread.post(Stop(make_group(1).key))
        await until(lambda: observer.outcomes[-1].load.running_sequences == 0)
        assert not engine.has_work
        assert len(observer.answers()[make_group(1).key]) < 1500


@pytest.mark.asyncio
async def test_an_idle_engine_ticks_and_does_not_spin() -> None:
    async with running(idle_tick_s=0.02) as (thread, observer):
        await thread.start()
        first_s = thread.last_step_s
        await until(lambda: len(observer.outcomes) >= 3)
        assert thread.last_step_s > first_s
        assert all(not outcome.tokens for outcome in observer.outcomes)
    async with running(idle_tick_s=1000.0) as (thread, observer):
        await thread.start()
        first_s = thread.last_step_s
        thread.post(Stop(make_group(1).key))
        await until(lambda: thread.last_step_s > first_s)
        # The first outcome tells the load; after that nothing happens that is worth telling.
        told, last_s = len(observer.outcomes), thread.last_step_s
        thread.post(Stop(make_group(1).key))
        await until(lambda: thread.last_step_s > last_s)
        await asyncio.sleep(0)
        assert told <= len(observer.outcomes) <= 1


@pytest.mark.asyncio
async def test_a_factory_that_fails_is_told() -> None:
    def failing_factory() -> Engine:
        raise OSError("no model there")

    async with running(failing_factory) as (thread, observer):
        with pytest.raises(OSError, match="no model there"):
            await thread.start()
        await until(lambda: bool(observer.errors))
        assert thread.state is EngineState.BROKEN
        thread.post(Stop(make_group(1).key))
    assert thread.state is EngineState.BROKEN
    assert len(observer.errors) == 1


class FailingRunner(ScriptedRunner):
    def run(
        self, slices: Sequence[SequenceSlice], copies: Sequence[BlockCopy], on_layers: object = None
    ) -> list[list[Sampled]]:
        raise MemoryError("no memory")


@pytest.mark.asyncio
async def test_a_step_that_fails_is_told_after_its_outcome() -> None:
    async with running(lambda: Engine(FailingRunner(10))) as (thread, observer):
        await thread.start()
        thread.post(Prefill(make_group(1)))
        await until(lambda: bool(observer.errors))
        assert [failed.error.code for failed in observer.outcomes[-1].failed] == [ErrorCode.engine_failed]
        assert isinstance(observer.errors[0], MemoryError)
        assert thread.state is EngineState.BROKEN


@pytest.mark.asyncio
async def test_a_defect_of_the_caller_breaks_the_engine_loudly() -> None:
    async with running() as (thread, observer):
        await thread.start()
        thread.post(Prefill(make_group(1)))
        thread.post(Prefill(make_group(1)))
        await until(lambda: bool(observer.errors))
        assert "IllegalTransition" in type(observer.errors[0]).__name__
        assert thread.state is EngineState.BROKEN


@pytest.mark.asyncio
async def test_a_core_that_is_not_there_is_one_line_before_anything_is_loaded() -> None:
    def load() -> Engine:
        raise AssertionError("it has begun to load")

    async with running(load, core=1 << 20) as (thread, _):
        with pytest.raises(
            StartupError, match=r"engine\.core is 1048576, and this process may use .*: set one of these"
        ):
            await thread.start()


@pytest.mark.asyncio
async def test_only_the_engines_thread_is_pinned() -> None:
    cores = os.sched_getaffinity(0)
    core = max(cores)
    seen: list[set[int]] = []

    class WatchedRunner(ScriptedRunner):
        def run(
            self, slices: Sequence[SequenceSlice], copies: Sequence[BlockCopy], on_layers: object = None
        ) -> list[list[Sampled]]:
            seen.append(os.sched_getaffinity(0))
            return super().run(slices, copies)

    async with running(lambda: Engine(WatchedRunner(10)), core=core) as (thread, _):
        await thread.start()
        thread.post(Prefill(make_group(1)))
        await until(lambda: bool(seen))
        assert seen == [{core}]
        assert os.sched_getaffinity(0) == cores


@pytest.mark.asyncio
async def test_a_thread_that_never_started_can_be_stopped() -> None:
    async with running() as (thread, observer):
        pass
    assert thread.state is EngineState.STOPPED
    assert observer.outcomes == []


@pytest.mark.asyncio
async def test_a_thread_that_hangs_is_left_behind() -> None:
    begun, released = threading.Event(), threading.Event()

    def hang() -> Engine:
        begun.set()
        released.wait(DEADLINE_S)
        return make_engine()

    async with running(hang) as (thread, _):
        thread.start()
        await asyncio.to_thread(begun.wait, DEADLINE_S)
        await asyncio.to_thread(thread.stop, 0.01)
        assert thread.state is EngineState.STOPPED
        released.set()
