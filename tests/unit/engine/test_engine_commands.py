"""An engine under commands in any order."""

from dataclasses import replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.core.events import Token
from pdserve.core.ids import AttemptKey, GroupId
from pdserve.engine.engine import Engine
from pdserve.engine.scripted import ScriptedRunner, scripted_kv
from pdserve.engine.settings import SchedulerSettings
from pdserve.engine.work import Commit, Granted, Group, Prefill, Release, Reserve, StepOutcome, Stop
from tests.unit.engine.scripted_groups import make_group, right_answer

SHAPES = {
    "prompt": st.integers(0, 3),
    "prompt_tokens": st.sampled_from([1, 15, 16, 17, 33, 70]),
    "n": st.integers(1, 3),
    "max_tokens": st.integers(1, 20),
    "replayed_tokens": st.sampled_from([0, 0, 1, 5]),
}


class EngineUnderAnyCommands(RuleBasedStateMachine):
    """Commands in any order: tables agree after each, every answer is a prefix of the right one, and all blocks return."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(ScriptedRunner(40), SchedulerSettings(step_tokens=24, max_sequences=6, max_waiting=8))
        self.groups: dict[AttemptKey, Group] = {}
        self.reserved: dict[AttemptKey, Granted] = {}
        self.answers: dict[tuple[AttemptKey, int], dict[int, int]] = {}

    def new_group(self, prompt: int, prompt_tokens: int, n: int, max_tokens: int, replayed_tokens: int) -> Group:
        group = make_group(prompt, prompt_tokens, n=n, max_tokens=max_tokens, temperature=prompt % 2)
        key = AttemptKey(GroupId(1, len(self.groups)), 1)
        siblings: tuple[int, ...] = group.siblings
        token_ids = group.token_ids
        if replayed_tokens < max_tokens and replayed_tokens:
            siblings = siblings[-1:]
            token_ids = np.array([*token_ids, *right_answer(group, siblings[0])[:replayed_tokens]], np.int32)
        group = replace(group, key=key, siblings=siblings, token_ids=token_ids)
        self.groups[key] = group
        return group

    @rule(then_decode=st.booleans(), **SHAPES)
    def prefill(
        self, then_decode: bool, prompt: int, prompt_tokens: int, n: int, max_tokens: int, replayed_tokens: int
    ) -> None:
        group = self.new_group(prompt, prompt_tokens, n, max_tokens, replayed_tokens)
        self.engine.apply(Prefill(group, then_decode))

    @rule(**SHAPES)
    def reserve(self, prompt: int, prompt_tokens: int, n: int, max_tokens: int, replayed_tokens: int) -> None:
        self.engine.apply(Reserve(self.new_group(prompt, prompt_tokens, n, max_tokens, replayed_tokens)))

    @precondition(lambda self: self.reserved)
    @rule(index=st.integers(0, 20))
    def commit(self, index: int) -> None:
        key = list(self.reserved)[index % len(self.reserved)]
        granted, group = self.reserved.pop(key), self.groups[key]
        start = len(group.token_ids)
        kv = scripted_kv(group.token_ids).reshape(2, 2, 2, start, -1)[:, :, :, granted.held_tokens :]
        tokens = range(granted.held_tokens, start)
        self.engine.runner.pool.write(granted.block_ids, tokens, range(2), np.ascontiguousarray(kv).reshape(-1))
        first = [right_answer(group, sibling)[start - group.prompt_tokens] for sibling in group.siblings]
        self.engine.apply(
            Commit(
                key, tuple(Token(key, s, start, token_id) for s, token_id in zip(group.siblings, first, strict=True))
            )
        )

    @precondition(lambda self: self.groups)
    @rule(index=st.integers(0, 20), siblings=st.none() | st.frozensets(st.integers(0, 2)))
    def stop(self, index: int, siblings: frozenset[int] | None) -> None:
        self.engine.apply(Stop(self.some_key(index), siblings))

    @precondition(lambda self: self.groups)
    @rule(index=st.integers(0, 20))
    def release(self, index: int) -> None:
        key = self.some_key(index)
        self.engine.apply(Release(key))
        self.reserved.pop(key, None)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.learn(self.engine.step())

    @invariant()
    def tables_agree(self) -> None:
        self.engine.scheduler.check()

    def teardown(self) -> None:
        while self.engine.has_work:
            self.learn(self.engine.step())
        for key in self.groups:
            self.engine.apply(Release(key))
        while self.engine.has_work:
            self.learn(self.engine.step())
            for key in self.groups:
                self.engine.apply(Release(key))
        assert self.engine.error is None
        assert not self.engine.scheduler.attempts
        load = self.engine.scheduler.load()
        assert load.free_blocks + load.cached_blocks == load.total_blocks
        assert load.queued_tokens == load.queued_sequences == load.running_sequences == 0

    def some_key(self, index: int) -> AttemptKey:
        return list(self.groups)[-1 - index % len(self.groups)]

    def learn(self, outcome: StepOutcome) -> None:
        self.reserved |= {granted.key: granted for granted in outcome.granted}
        for token in outcome.tokens:
            group = self.groups[token.key]
            right = right_answer(group, token.sibling)
            assert token.token_id == right[token.position - group.prompt_tokens]
            answer = self.answers.setdefault((token.key, token.sibling), {})
            assert token.position == len(group.token_ids) or token.position - 1 in answer
            answer[token.position] = token.token_id


EngineUnderAnyCommands.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestEngineUnderAnyCommands = EngineUnderAnyCommands.TestCase
