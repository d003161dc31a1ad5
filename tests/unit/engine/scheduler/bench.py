"""A scheduler on a clock of its own, driven by hand, with all its tables compared after every step."""

from collections.abc import Callable, Sequence

import numpy as np

from pdserve.core.events import Token, TokenLogprobs
from pdserve.core.ids import AttemptKey, GroupId
from pdserve.core.sampling import SamplingParams
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.settings import SchedulerSettings
from pdserve.engine.work import (
    Command,
    Granted,
    Group,
    Prefill,
    Reserve,
    Sampled,
    SampleSpec,
    SequenceSlice,
    StepOutcome,
    StepPlan,
)
from tests.geometries import geometry

BLOCK_SIZE = 4
GEOMETRY = geometry(block_size=BLOCK_SIZE)


def key(counter: int, attempt: int = 1) -> AttemptKey:
    return AttemptKey(GroupId(1, counter), attempt)


def group(
    counter: int = 1,
    prompt_tokens: int = 6,
    *,
    attempt: int = 1,
    n: int = 1,
    replayed_tokens: int = 0,
    max_tokens: int = 8,
    min_tokens: int = 0,
    stop_ids: Sequence[int] = (),
    arrival_s: float = 0.0,
    priority: int = 0,
    cache_scope: str = "",
    first_id: int | None = None,
    prompt_logprobs: int | None = None,
) -> Group:
    """A group whose prompt is its own unless `first_id` says where its token ids start."""
    start = counter * 1000 if first_id is None else first_id
    return Group(
        key=key(counter, attempt),
        siblings=tuple(range(n)),
        token_ids=np.arange(start, start + prompt_tokens + replayed_tokens, dtype=np.int32),
        prompt_tokens=prompt_tokens,
        params=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_ids=frozenset(stop_ids),
            prompt_logprobs=prompt_logprobs,
        ),
        seed=7,
        cache_scope=cache_scope,
        arrival_s=arrival_s,
        priority=priority,
    )


def first_tokens(of: Group, *, token_id: int = 50) -> tuple[Token, ...]:
    """What prefill sends with its commit."""
    return tuple(Token(of.key, sibling, len(of.token_ids), token_id) for sibling in of.siblings)


def _scored(part: SequenceSlice) -> list[Sampled]:
    """Every prompt token's log-probability is minus its id."""
    token_ids = [] if part.scores is None else part.scores.token_ids.tolist()
    return [Sampled(token_id, TokenLogprobs(-float(token_id))) for token_id in token_ids]


class Bench:
    """Attributes:
    now_s: the clock, moved by tests.
    plan: the last one.
    """

    def __init__(
        self,
        total_blocks: int = 64,
        *,
        step_tokens: int = 16,
        max_sequences: int = 8,
        max_waiting: int = 100,
        max_context_tokens: int = 200,
    ) -> None:
        self.now_s = 100.0
        self.plan = StepPlan(())
        self.blocks = BlockManager(total_blocks)
        settings = SchedulerSettings(step_tokens=step_tokens, max_sequences=max_sequences, max_waiting=max_waiting)
        self.scheduler = Scheduler(self.blocks, GEOMETRY, max_context_tokens, settings, lambda: self.now_s)

    def apply(self, *commands: Command) -> None:
        for command in commands:
            self.scheduler.apply(command)
            self.scheduler.check()

    def step(self, choose: Callable[[SampleSpec], int] = lambda spec: 50, *, duration_s: float = 0.0) -> StepOutcome:
        """One step in which `choose` samples."""
        self.plan = self.scheduler.plan()
        self.now_s += duration_s
        outcome = self.scheduler.commit(
            self.plan,
            [[*_scored(part), *(Sampled(choose(spec)) for spec in part.samples)] for part in self.plan.slices],
        )
        self.scheduler.check()
        return outcome

    def run(self, choose: Callable[[SampleSpec], int] = lambda spec: 50) -> list[StepOutcome]:
        """Steps until nothing is left to do."""
        outcomes = []
        while self.scheduler.has_work:
            outcomes.append(self.step(choose))
            assert len(outcomes) < 1000, "the scheduler always has work"
        return outcomes

    def prefilled(self, of: Group) -> None:
        """Bring a group to the state in which its first tokens are out."""
        self.apply(Prefill(of))
        self.run()

    def granted(self, of: Group) -> Granted:
        """Bring a group to the state in which its blocks are reserved."""
        self.apply(Reserve(of))
        (granted,) = self.step().granted
        return granted

    @property
    def used_blocks(self) -> int:
        return self.blocks.used_blocks
