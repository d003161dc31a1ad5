"""Engines end to end without a model: a prefill and a decode engine, joined by hand, give the scripted answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import Token
from pdserve.core.ids import AttemptKey, GroupId
from pdserve.core.sampling import SamplingParams
from pdserve.engine.engine import Engine
from pdserve.engine.scripted import ScriptedRunner, scripted_answer, scripted_kv
from pdserve.engine.settings import SchedulerSettings
from pdserve.engine.work import (
    BlockCopy,
    Commit,
    Granted,
    Group,
    Prefill,
    Progress,
    Release,
    Reserve,
    Sampled,
    SequenceSlice,
    StepOutcome,
    Stop,
)

BLOCK_SIZE = 16
CHUNK_TOKENS = 64
EDGES = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 300]


def make_engine(num_blocks: int = 400) -> Engine:
    return Engine(ScriptedRunner(num_blocks), SchedulerSettings(step_tokens=CHUNK_TOKENS, max_sequences=32))


def make_group(
    counter: int, prompt_tokens: int, *, n: int = 1, max_tokens: int = 20, temperature: float = 0.0
) -> Group:
    rng = np.random.default_rng(counter)
    return Group(
        key=AttemptKey(GroupId(1, counter), 1),
        siblings=tuple(range(n)),
        token_ids=rng.integers(0, 49152, prompt_tokens, dtype=np.int32),
        prompt_tokens=prompt_tokens,
        params=SamplingParams(max_tokens=max_tokens, temperature=temperature),
        seed=counter,
        arrival_s=float(counter),
    )


def right_answer(group: Group, sibling: int) -> list[int]:
    prompt_ids = group.token_ids[: group.prompt_tokens]
    return scripted_answer(prompt_ids, group.params, seed=group.seed, sibling=sibling)


@dataclass
class Pair:
    """A prefill and a decode engine, and what would be the wire between them."""

    prefill: Engine = field(default_factory=make_engine)
    decode: Engine = field(default_factory=make_engine)
    groups: dict[AttemptKey, Group] = field(default_factory=dict)
    granted: dict[AttemptKey, Granted] = field(default_factory=dict)
    progress: dict[AttemptKey, Progress] = field(default_factory=dict)
    answers: dict[tuple[AttemptKey, int], dict[int, int]] = field(default_factory=dict)

    def submit(self, group: Group) -> None:
        self.groups[group.key] = group
        self.decode.apply(Reserve(group))

    def run(self) -> None:
        while self.prefill.has_work or self.decode.has_work:
            decoded = self.decode.step()
            for granted in decoded.granted:
                self.granted[granted.key] = granted
                self.prefill.apply(Prefill(self.groups[granted.key]))
            self.take(decoded.tokens)
            prefilled = self.prefill.step()
            self.progress |= {progress.key: progress for progress in prefilled.progress}
            self.take(prefilled.tokens)
            for key in {token.key for token in prefilled.tokens}:
                self.hand_off(key, [token for token in prefilled.tokens if token.key == key])
            assert not decoded.failed
            assert not prefilled.failed

    def hand_off(self, key: AttemptKey, first_tokens: Sequence[Token]) -> None:
        layers = range(self.prefill.runner.geometry.num_layers)
        tokens = range(self.granted[key].held_tokens, len(self.groups[key].token_ids))
        kv = self.prefill.runner.pool.read(self.progress[key].block_ids, tokens, layers)
        self.decode.runner.pool.write(self.granted[key].block_ids, tokens, layers, kv)
        self.decode.apply(Commit(key, tuple(first_tokens)))
        self.prefill.apply(Release(key))

    def take(self, tokens: Sequence[Token]) -> None:
        for token in tokens:
            answer = self.answers.setdefault((token.key, token.sibling), {})
            # Only the first token comes twice, and then it is the same.
            assert answer.setdefault(token.position, token.token_id) == token.token_id

    def check_answers(self) -> None:
        for group in self.groups.values():
            start = len(group.token_ids)
            for sibling in group.siblings:
                answer = self.answers[group.key, sibling]
                right = right_answer(group, sibling)
                assert answer == dict(enumerate(right[start - group.prompt_tokens :], start))

    def check_idle(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.scheduler.check()
            assert not engine.scheduler.attempts
            load = engine.scheduler.load()
            assert load.free_blocks + load.cached_blocks == load.total_blocks
            assert load.queued_tokens == load.queued_sequences == load.running_sequences == 0


@pytest.mark.parametrize("prompt_tokens", EDGES)
@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_alone_is_answered_right(prompt_tokens: int, n: int) -> None:
    pair = Pair()
    pair.submit(make_group(1, prompt_tokens, n=n, temperature=1.0 if n > 1 else 0.0))
    pair.run()
    pair.check_answers()
    pair.check_idle()


def test_prompts_in_a_batch_are_answered_as_alone() -> None:
    pair = Pair()
    for counter, prompt_tokens in enumerate(EDGES * 2):
        pair.submit(make_group(counter, prompt_tokens, n=1 + counter % 3, temperature=counter % 2))
    pair.run()
    pair.check_answers()
    pair.check_idle()


@pytest.mark.parametrize("prompt_tokens", EDGES)
def test_a_warm_cache_changes_no_answer(prompt_tokens: int) -> None:
    pair = Pair()
    for _ in range(3):
        group = make_group(1, prompt_tokens)
        group = replace(group, key=AttemptKey(GroupId(1, len(pair.groups)), 1))
        pair.submit(group)
        pair.run()
    held_tokens = (prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert [granted.held_tokens for granted in pair.granted.values()] == [0, held_tokens, held_tokens]
    pair.check_answers()
    pair.check_idle()


@pytest.mark.parametrize("prompt_tokens", EDGES)
def test_a_second_turn_uses_the_cache_of_the_first_answer_and_is_answered_right(prompt_tokens: int) -> None:
    pair = Pair()
    first = make_group(1, prompt_tokens, max_tokens=40)
    pair.submit(first)
    pair.run()
    written = [*first.token_ids, *right_answer(first, 0)]
    second = replace(
        make_group(2, 1), token_ids=np.array([*written, 5, 6, 7], np.int32), prompt_tokens=len(written) + 3
    )
    pair.submit(second)
    pair.run()
    # The first answer's last token was never computed.
    assert pair.granted[second.key].held_tokens == (len(written) - 1) // BLOCK_SIZE * BLOCK_SIZE
    pair.check_answers()
    pair.check_idle()


@pytest.mark.parametrize("replayed_tokens", [1, 7, 19])
def test_a_replay_goes_on_where_the_lost_attempt_was(replayed_tokens: int) -> None:
    pair = Pair()
    group = make_group(1, 30, n=3, temperature=1.0)
    written = right_answer(group, 2)[:replayed_tokens]
    token_ids = np.array([*group.token_ids, *written], np.int32)
    pair.submit(replace(group, siblings=(2,), token_ids=token_ids))
    pair.run()
    pair.check_answers()


def test_small_pools_delay_answers_and_change_none() -> None:
    pair = Pair(make_engine(num_blocks=20), make_engine(num_blocks=24))
    for counter, prompt_tokens in enumerate([300, 1, 17, 64, 200, 300, 33, 5]):
        pair.submit(make_group(counter, prompt_tokens))
    pair.run()
    pair.check_answers()
    pair.check_idle()


@pytest.mark.parametrize("n", [1, 3])
def test_a_colocated_engine_gives_the_same_answers(n: int) -> None:
    engine = make_engine()
    groups = [make_group(counter, tokens, n=n, temperature=1.0) for counter, tokens in enumerate(EDGES)]
    for group in groups:
        engine.apply(Prefill(group, then_decode=True))
    answers: dict[tuple[AttemptKey, int], list[int]] = {}
    while engine.has_work:
        for token in engine.step().tokens:
            answers.setdefault((token.key, token.sibling), []).append(token.token_id)
    assert answers == {(group.key, sibling): right_answer(group, sibling) for group in groups for sibling in range(n)}
    assert not engine.scheduler.attempts
    assert engine.scheduler.load().running_sequences == 0


class BrokenRunner(ScriptedRunner):
    """Computes until it is told to break."""

    broken = False

    def run(
        self, slices: Sequence[SequenceSlice], copies: Sequence[BlockCopy], on_layers: object = None
    ) -> list[list[Sampled]]:
        if self.broken:
            raise RuntimeError("out of memory")
        return super().run(slices, copies)


class ShortRunner(ScriptedRunner):
    """Forgets to sample."""

    def run(
        self, slices: Sequence[SequenceSlice], copies: Sequence[BlockCopy], on_layers: object = None
    ) -> list[list[Sampled]]:
        return []


def test_a_step_that_cannot_be_run_fails_its_attempts_and_breaks_the_engine() -> None:
    runner = BrokenRunner(100)
    engine = Engine(runner)
    engine.apply(Prefill(make_group(1, 10), then_decode=True))
    engine.step()
    runner.broken = True
    engine.apply(Prefill(make_group(2, 10)))
    outcome = engine.step()
    assert {failed.key.group.counter for failed in outcome.failed} == {1, 2}
    assert {failed.error.code for failed in outcome.failed} == {ErrorCode.engine_failed}
    assert "RuntimeError: out of memory" in outcome.failed[0].error.message
    assert isinstance(engine.error, RuntimeError)
    assert not engine.has_work
    with pytest.raises(PdserveError, match="engine_failed"):
        engine.step()


def test_a_context_shorter_than_the_models_is_kept() -> None:
    engine = Engine(ScriptedRunner(100), SchedulerSettings(max_context_tokens=20))
    engine.apply(Prefill(make_group(1, 20), then_decode=True))
    engine.apply(Prefill(make_group(2, 18, max_tokens=8), then_decode=True))
    outcomes = [engine.step() for _ in range(3)]
    assert [failed.error.code for failed in outcomes[0].failed] == [ErrorCode.context_length_exceeded]
    assert [token.position for outcome in outcomes for token in outcome.tokens] == [18, 19]


def test_results_that_do_not_fit_the_plan_break_the_engine() -> None:
    engine = Engine(ShortRunner(100))
    engine.apply(Prefill(make_group(1, 10)))
    assert [failed.error.code for failed in engine.step().failed] == [ErrorCode.engine_failed]
    assert engine.error is not None


def test_an_empty_step_does_not_trouble_the_runner() -> None:
    runner = BrokenRunner(10)
    runner.broken = True
    engine = Engine(runner)
    assert engine.step().load.total_blocks == 10
    assert engine.error is None


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
