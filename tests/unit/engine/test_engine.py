"""Engines end to end without a model: a prefill and a decode engine, joined by hand, give the scripted answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import Token
from pdserve.core.ids import AttemptKey, GroupId
from pdserve.engine.engine import Engine
from pdserve.engine.scripted import ScriptedRunner
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
)
from tests.unit.engine.scripted_groups import make_group, right_answer

BLOCK_SIZE = 16
CHUNK_TOKENS = 64
EDGES = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 300]


def make_engine(num_blocks: int = 400) -> Engine:
    return Engine(ScriptedRunner(num_blocks), SchedulerSettings(step_tokens=CHUNK_TOKENS, max_sequences=32))


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
