"""The push that is measured is the real one, into a decode worker in a process of its own."""

import subprocess
import sys

import numpy as np

from bench.kv_link import IN_FLIGHT, PUSH_BYTES
from bench.kv_receiver import GEOMETRY, POOL_PUSHES, PUSH_TOKENS, IdleRunner
from pdserve.core.sampling import SamplingParams
from pdserve.engine.work import SampleSpec, SequenceSlice


def test_caches_arrive_and_are_acknowledged() -> None:
    command = [sys.executable, "-m", "bench.kv_link", str(PUSH_BYTES)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) > 0


def test_a_push_is_the_default_models_cache_of_its_prompt() -> None:
    assert PUSH_BYTES == PUSH_TOKENS * 23_040


def test_the_receiver_has_room_for_what_is_in_flight() -> None:
    assert POOL_PUSHES >= IN_FLIGHT
    assert IdleRunner().pool.num_blocks >= POOL_PUSHES * GEOMETRY.blocks_for(PUSH_TOKENS)


def test_the_idle_runner_answers_what_is_asked_and_computes_nothing() -> None:
    runner = IdleRunner()
    token_ids = np.zeros(4, np.int32)
    spec = SampleSpec(
        params=SamplingParams(max_tokens=1), seed=0, sibling=0, position=4, token_ids=token_ids, prompt_tokens=4
    )
    sampled = runner.run([SequenceSlice(token_ids, 0, [0], (spec, spec)), SequenceSlice(token_ids, 0, [1])], [])
    assert [len(each) for each in sampled] == [2, 0]
    assert not runner.pool.memory.any()
