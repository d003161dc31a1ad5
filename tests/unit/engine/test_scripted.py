"""The scripted runner: no torch, bytes that depend on the prompt, tokens that depend on the bytes."""

import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from pdserve.core.sampling import SamplingParams
from pdserve.engine.scripted import (
    SCRIPTED_GEOMETRY,
    Script,
    ScriptedRunner,
    scripted_answer,
    scripted_kv,
    scripted_token,
)
from pdserve.engine.work import BlockCopy, SampleSpec, SequenceSlice, TokenIds

PROMPT = np.arange(100, 140, dtype=np.int32)
GREEDY = SamplingParams(max_tokens=10, temperature=0.0)
LAYERS = range(SCRIPTED_GEOMETRY.num_layers)
BLOCKS = (3, 5, 1)


def spec(token_ids: TokenIds, params: SamplingParams = GREEDY, *, prompt_tokens: int = 40, **of: int) -> SampleSpec:
    return SampleSpec(
        params=params,
        seed=of.get("seed", 0),
        sibling=of.get("sibling", 0),
        position=len(token_ids),
        token_ids=token_ids,
        prompt_tokens=prompt_tokens,
    )


def prefilled(token_ids: TokenIds = PROMPT) -> ScriptedRunner:
    runner = ScriptedRunner(8)
    runner.run([SequenceSlice(token_ids, 0, BLOCKS)], ())
    return runner


def sampled(runner: ScriptedRunner, params: SamplingParams = GREEDY, **of: int) -> int:
    """The token after PROMPT, whose last token is computed once more."""
    part = SequenceSlice(PROMPT[-1:], len(PROMPT) - 1, BLOCKS, (spec(PROMPT, params, **of),))
    return runner.run([part], ())[0][0].token_id


def test_it_reaches_torch_by_no_path() -> None:
    code = "import sys, pdserve.engine.engine, pdserve.engine.scripted; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("chunks", [[40], [16, 16, 8], [1, 15, 17, 7], [39, 1]])
def test_the_pool_holds_the_same_bytes_however_the_prompt_is_cut(chunks: list[int]) -> None:
    runner = ScriptedRunner(8)
    start = 0
    for size in chunks:
        runner.run([SequenceSlice(PROMPT[start : start + size], start, BLOCKS)], ())
        start += size
    kv = runner.pool.read(BLOCKS, range(40), LAYERS)
    np.testing.assert_array_equal(kv, scripted_kv(PROMPT))


def test_a_tokens_bytes_depend_on_every_token_before_it_and_on_none_after() -> None:
    shape = (SCRIPTED_GEOMETRY.num_layers, 2, SCRIPTED_GEOMETRY.num_kv_heads, 40, -1)
    kv = scripted_kv(PROMPT).reshape(shape)
    changed = PROMPT.copy()
    changed[20] += 1
    differs = (kv != scripted_kv(changed).reshape(shape)).any(axis=-1)
    assert not differs[..., :20].any()
    assert differs[:, :, :, 20:].all()


def test_a_right_pool_gives_the_scripted_token() -> None:
    assert sampled(prefilled()) == scripted_token(PROMPT, 40, GREEDY) == scripted_answer(PROMPT, GREEDY)[0]


def test_an_answer_goes_on_from_its_own_tokens() -> None:
    answer = scripted_answer(PROMPT, GREEDY)
    assert len(answer) == 10
    written = np.array([*PROMPT, *answer[:4]], np.int32)
    assert scripted_token(written, 40, GREEDY) == answer[4]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("head", range(SCRIPTED_GEOMETRY.num_kv_heads))
def test_any_byte_that_is_wrong_changes_the_answer(block: int, layer: int, half: int, head: int) -> None:
    runner = prefilled()
    runner.pool.memory[layer, half, block, head, 5, 3] ^= 1
    assert sampled(runner) != sampled(prefilled())


def test_a_missing_or_swapped_block_changes_the_answer() -> None:
    right = sampled(prefilled())
    runner = prefilled()
    runner.pool.memory[:, :, 5] = 0
    assert sampled(runner) != right
    part = SequenceSlice(PROMPT[-1:], 39, (5, 3, 1), (spec(PROMPT),))
    assert prefilled().run([part], ())[0][0].token_id != right


def test_blocks_are_copied_before_the_step() -> None:
    runner = prefilled()
    part = SequenceSlice(PROMPT[-1:], 39, (3, 5, 7), (spec(PROMPT),))
    assert runner.run([part], [BlockCopy(1, 7)])[0][0].token_id == sampled(prefilled())


def test_greedy_answers_ignore_seed_and_sibling_and_others_do_not() -> None:
    drawn = SamplingParams(max_tokens=10, temperature=1.0)
    for params, num_answers in ((GREEDY, 1), (drawn, 4)):
        answers = {
            tuple(scripted_answer(PROMPT, params, seed=seed, sibling=sibling)) for seed in (1, 2) for sibling in (0, 1)
        }
        assert len(answers) == num_answers
    assert sampled(prefilled(), drawn, seed=2, sibling=1) == scripted_answer(PROMPT, drawn, seed=2, sibling=1)[0]


def test_tokens_are_in_the_scripts_range() -> None:
    script = Script(vocab_size=64, first_token_id=20, num_token_ids=5)
    answer = scripted_answer(PROMPT, SamplingParams(max_tokens=50), script=script)
    assert {20, 21, 22, 23, 24} == set(answer)
    with pytest.raises(ValueError, match="vocabulary"):
        Script(vocab_size=64, first_token_id=60, num_token_ids=5)


@pytest.mark.parametrize(
    ("limits", "length"),
    [
        ({"stop_ids": frozenset([2, 9])}, 4),
        ({"stop_ids": frozenset([2, 9]), "min_tokens": 6}, 7),
        ({"stop_ids": frozenset([2]), "max_tokens": 3}, 3),
        ({}, 10),
    ],
)
def test_a_script_ends_answers_by_a_stop_id(limits: dict[str, object], length: int) -> None:
    params = replace(GREEDY, **limits)
    answer = scripted_answer(PROMPT, params, script=Script(answer_tokens=4))
    assert len(answer) == length
    assert (answer[-1] == 2) == (length in (4, 7))


def test_logprobs_are_there_when_asked_for() -> None:
    runner = prefilled()
    params = replace(GREEDY, top_logprobs=3)
    ((result,),) = runner.run([SequenceSlice(PROMPT[-1:], 39, BLOCKS, (spec(PROMPT, params),))], ())
    assert result.logprobs is not None
    assert result.logprobs.top_ids[0] == result.token_id
    assert len(result.logprobs.top_ids) == len(result.logprobs.top_logprobs) == 3


def test_a_step_takes_as_long_as_the_script_says() -> None:
    script = Script(step_s=1.0, prefill_token_s=0.01, decode_row_s=0.1)
    prompt = SequenceSlice(PROMPT, 0, BLOCKS, (spec(PROMPT),))
    row = SequenceSlice(PROMPT[-1:], 39, BLOCKS, (spec(PROMPT, prompt_tokens=20),))
    assert script.step_duration_s([prompt, row, row]) == pytest.approx(1.0 + 40 * 0.01 + 2 * 0.1)
    runner = ScriptedRunner(8, Script(step_s=0.02))
    start_s = time.monotonic()
    runner.run([prompt], ())
    assert time.monotonic() - start_s >= 0.02


def test_heads_of_odd_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 8 bytes"):
        ScriptedRunner(8, geometry=replace(SCRIPTED_GEOMETRY, head_dim=3))


def test_an_echo_reads_the_prompt_back_from_the_pool_and_then_ends() -> None:
    script = Script(echo=True)
    params = replace(GREEDY, stop_ids=frozenset({7}), max_tokens=100)
    assert scripted_answer(PROMPT, params, script=script) == [*PROMPT, 7]
    assert scripted_answer(PROMPT, replace(GREEDY, max_tokens=50), script=script) == [*PROMPT, *PROMPT[:10]]


def test_an_echo_from_a_pool_that_holds_another_prompt_is_not_the_prompt() -> None:
    script = Script(echo=True)
    runner = ScriptedRunner(8, script)
    runner.run([SequenceSlice(PROMPT + 1, 0, BLOCKS)], ())
    assert sampled(runner) == PROMPT[0] + 1
