"""In float32, greedy output through the split equals transformers' `generate`, token for token (invariant 1).

The real model, two workers of each role in processes of their own, chunks of 128 tokens and blocks of 16. Forty prompts of
real text, those at the edges of blocks and chunks among them. All of them run sixteen at once on one pair of workers, cold
and then from the prefix caches, over every pair of two and two, and alone.
"""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from pdserve.core.ids import AttemptKey
from pdserve.core.sampling import SamplingParams
from pdserve.engine.checkpoint import ensure_model
from pdserve.model_folder import DEFAULT_MODEL
from tests.manual_frontend import Link, ManualFrontend
from tests.reference import reference_answers
from tests.steps import Expected
from tests.worker_processes import WorkerProcess, frontend_to, worker_processes

# From nothing, the model is converted and the reference computed first; on a busy machine each takes minutes.
pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(500)]

BLOCK, CHUNK, WAVE = 16, 128, 16
EDGES = (1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2000)
NUM_PROMPTS = 40
# Of these the answers are long; all in one wave, whose steps are as many as its longest answer's tokens.
LONG_ANSWERS = (17, 20, 24, 28)
ANSWER_S = 120.0
SETTINGS = {
    "model": {"dtype": "float32"},
    "engine": {"num_blocks": 700, "step_tokens": CHUNK, "max_running": 64},
    # With five processes on two cores a pulse may be late.
    "session": {"quiet_after_s": 20.0, "dead_after_s": 30.0},
}


class Case:
    """One prompt, and what the reference says to it."""

    def __init__(self, prompt: list[int], expected: Expected) -> None:
        self.prompt = prompt
        self.expected = expected
        self.params = SamplingParams(max_tokens=len(expected.token_ids), temperature=0.0)


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_model(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def cases(folder: Path) -> list[Case]:
    prompts = real_prompts(folder)
    counts = [64 if index in LONG_ANSWERS else 16 for index in range(NUM_PROMPTS)]
    answers = reference_answers(folder, prompts, counts)
    return [Case(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


@pytest.fixture(scope="module")
def processes(cases: list[Case], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerProcess, ...]]:
    """Two of each role; the reference is computed by then, so that nothing else runs beside them."""
    with worker_processes(tmp_path_factory.mktemp("workers"), [SETTINGS] * 2, [SETTINGS] * 2) as started:
        yield started


def real_prompts(folder: Path) -> list[list[int]]:
    """Forty beginnings of texts, each with a first token of its own: none is in a cache because of another."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    texts = [tokenizer.encode(topics[name][:20_000]) for name in sorted(topics)]
    by_first_token = {text[0]: text for text in sorted(texts, key=len)}
    longest_first = sorted(by_first_token.values(), key=len, reverse=True)
    lengths = [*EDGES, *np.random.default_rng(0).integers(2, 160, NUM_PROMPTS - len(EDGES)).tolist()]
    cut = dict(zip(sorted(range(NUM_PROMPTS), key=lambda i: -lengths[i]), longest_first, strict=False))
    return [cut[index][:length] for index, length in enumerate(lengths)]


def dispatch(
    frontend: ManualFrontend,
    case: Case,
    scope: str,
    prefill: Link | None = None,
    decode: Link | None = None,
) -> AttemptKey:
    return frontend.dispatch(case.prompt, case.params, prefill=prefill, decode=decode, cache_scope=scope)


async def run_wave(
    frontend: ManualFrontend, cases: Sequence[Case], scope: str, pairs: Sequence[tuple[Link, Link]]
) -> list[AttemptKey]:
    """All at once, over these pairs of workers in turn; every answer is right."""
    keys = [dispatch(frontend, case, scope, *pairs[index % len(pairs)]) for index, case in enumerate(cases)]
    for key, case in zip(keys, cases, strict=True):
        await frontend.finish(key, deadline_s=ANSWER_S)
        assert_right(frontend, key, case)
    return keys


def assert_right(frontend: ManualFrontend, key: AttemptKey, case: Case) -> None:
    answer = frontend.answer(key)
    assert case.expected.accepts(answer), (
        f"a prompt of {len(case.prompt)} tokens: {answer} instead of {case.expected.token_ids}, "
        f"margins {case.expected.margins}"
    )


async def test_sixteen_at_once_from_a_cold_and_then_a_warm_prefix_cache(
    processes: tuple[WorkerProcess, ...], cases: list[Case]
) -> None:
    prefill, _, decode, _ = processes
    async with frontend_to(prefill, decode) as frontend:
        pairs = [(frontend.prefill, frontend.decode)]
        for warm in (False, True):
            for start in range(0, NUM_PROMPTS, WAVE):
                wave = cases[start : start + WAVE]
                keys = await run_wave(frontend, wave, "waves", pairs)
                for key, case in zip(keys, wave, strict=True):
                    # At least one token is computed, for its logits.
                    held = (len(case.prompt) - 1) // BLOCK * BLOCK if warm else 0
                    assert frontend.prefill.heard.cached_tokens(key) == held
        for process in (prefill, decode):
            await process.settle()


async def test_alone_from_a_cold_and_then_a_warm_prefix_cache(
    processes: tuple[WorkerProcess, ...], cases: list[Case]
) -> None:
    """Each is alone on its pair of workers; the other pair has other prompts meanwhile, for the sake of time."""

    async def run_alone(mine: Sequence[Case], pair: tuple[Link, Link]) -> None:
        for case in mine:
            for _ in ("cold", "warm"):
                key = dispatch(frontend, case, "alone", *pair)
                await frontend.finish(key, deadline_s=ANSWER_S)
                assert_right(frontend, key, case)

    async with frontend_to(*processes) as frontend:
        pairs = zip(frontend.prefills, frontend.decodes, strict=True)
        async with asyncio.TaskGroup() as group:
            for turn, pair in enumerate(pairs):
                group.create_task(run_alone(cases[turn::2], pair))
        for process in processes:
            await process.settle()


async def test_over_two_prefill_and_two_decode_workers(processes: tuple[WorkerProcess, ...], cases: list[Case]) -> None:
    async with frontend_to(*processes) as frontend:
        pairs = [(prefill, decode) for prefill in frontend.prefills for decode in frontend.decodes]
        assert len({link.welcome.epoch for pair in pairs for link in pair}) == 4
        # Each prompt goes to another pair the second time: some caches know it, others don't.
        for turn in range(2):
            for start in range(0, NUM_PROMPTS, WAVE):
                wave = cases[start : start + WAVE]
                await run_wave(frontend, wave, "two and two", pairs[turn:] + pairs[:turn])
        for process in processes:
            await process.settle()
