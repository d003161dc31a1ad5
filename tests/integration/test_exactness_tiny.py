"""In float32, greedy output of every architecture equals transformers' `generate`, token for token (invariant 1).

Tiny random models, each through a prefill and a decode process, at the edges of blocks and chunks. With one of them, three
hundred requests at once through pools that hold a few of them; and models that are refused.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.core.ids import AttemptKey
from pdserve.core.sampling import SamplingParams
from pdserve.rpc.v1.admin_pb2 import WorkerStatus
from tests.manual_frontend import ManualFrontend
from tests.reference import reference_answers
from tests.tiny_models import KINDS, tiny_model
from tests.worker_processes import WorkerProcess, frontend_to, worker_processes

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(240)]

BLOCK, CHUNK = 16, 64
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 200)
ANSWER_S = 60.0
FIRST_ID, LAST_ID = 2, 319


def settings_for(folder: Path, **engine: int) -> dict[str, Any]:
    return {
        "model": {"path": folder, "name": "tiny", "dtype": "float32"},
        "engine": {"num_blocks": 200, "step_tokens": CHUNK, "max_running": 32} | engine,
        "session": {"quiet_after_s": 20.0, "dead_after_s": 30.0},
    }


def random_prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(FIRST_ID, LAST_ID, length).tolist() for length in lengths]


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


class Reference:
    """Random prompts for one model, and what `generate` says to them."""

    def __init__(self, kind: str, models_dir: Path, lengths: Sequence[int], num_tokens: int) -> None:
        self.folder = tiny_model(kind, models_dir)
        self.prompts = random_prompts(lengths, seed=len(lengths))
        self.expected = reference_answers(self.folder, self.prompts, [num_tokens] * len(lengths))
        self.params = SamplingParams(max_tokens=num_tokens, temperature=0.0)

    def dispatch_all(self, frontend: ManualFrontend) -> list[AttemptKey]:
        return [frontend.dispatch(prompt, self.params) for prompt in self.prompts]

    async def assert_right(self, frontend: ManualFrontend, key: AttemptKey, index: int) -> None:
        """The answer to the prompt of this index, once it is complete."""
        await frontend.finish(key, deadline_s=ANSWER_S)
        answer, expected = frontend.answer(key), self.expected[index]
        assert expected.accepts(answer), (
            f"a prompt of {len(self.prompts[index])} tokens: {answer} instead of {expected}"
        )


@pytest.fixture
def architecture(request: pytest.FixtureRequest, models_dir: Path) -> Reference:
    return Reference(request.param, models_dir, LENGTHS, num_tokens=16)


@pytest.fixture(scope="module")
def three_hundred(models_dir: Path) -> Reference:
    reference = Reference("llama", models_dir, [5 + 7 * index % 70 for index in range(300)], num_tokens=8)
    assert len({tuple(prompt) for prompt in reference.prompts}) == 300
    return reference


@pytest.fixture(scope="module")
def tight_workers(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerProcess, ...]]:
    """A tiny Llama whose pools have room for about twelve requests."""
    settings = settings_for(tiny_model("llama", models_dir), num_blocks=60)
    with worker_processes(tmp_path_factory.mktemp("logs"), [settings], [settings]) as processes:
        yield processes


async def assert_all_back(*processes: WorkerProcess) -> None:
    """Every table empty, every block free or cached."""
    for process in processes:
        status: WorkerStatus = await process.settle()
        pulse = status.pulse
        assert pulse.free_blocks + pulse.cached_blocks == pulse.total_blocks
        assert (pulse.queued_sequences, pulse.running_sequences, pulse.queued_tokens) == (0, 0, 0)
        assert not await process.states()


@pytest.mark.parametrize("architecture", KINDS, indirect=True)
async def test_every_architecture_answers_as_the_reference(architecture: Reference, tmp_path: Path) -> None:
    settings = settings_for(architecture.folder)
    with worker_processes(tmp_path, [settings], [settings]) as processes:
        async with frontend_to(*processes) as frontend:
            for _ in ("cold", "warm"):
                keys = architecture.dispatch_all(frontend)
                for index, key in enumerate(keys):
                    await architecture.assert_right(frontend, key, index)
        await assert_all_back(*processes)


async def test_three_hundred_at_once_are_all_right_and_leave_nothing(
    tight_workers: tuple[WorkerProcess, ...], three_hundred: Reference
) -> None:
    _, decode = tight_workers
    async with frontend_to(*tight_workers) as frontend:
        keys = three_hundred.dispatch_all(frontend)
        most_queued = 0
        for index, key in enumerate(keys):
            most_queued = max(most_queued, (await decode.status()).pulse.queued_sequences)
            await three_hundred.assert_right(frontend, key, index)
        # They did wait for blocks.
        assert most_queued > 100
        await assert_all_back(*tight_workers)


async def test_three_siblings_with_a_seed_equal_three_requests_for_one(
    tight_workers: tuple[WorkerProcess, ...],
) -> None:
    params = SamplingParams(max_tokens=24, temperature=1.0, top_p=0.9)
    async with frontend_to(*tight_workers) as frontend:
        for length in (BLOCK, CHUNK + 5):
            (prompt,) = random_prompts([length], seed=length)
            together = await sampled(frontend, prompt, params, (0, 1, 2))
            assert len({tuple(answer) for answer in together}) == 3
            assert together == [(await sampled(frontend, prompt, params, (sibling,)))[0] for sibling in range(3)]
        await assert_all_back(*tight_workers)


async def sampled(
    frontend: ManualFrontend, prompt: list[int], params: SamplingParams, siblings: tuple[int, ...]
) -> list[list[int]]:
    key = frontend.dispatch(prompt, params, siblings=siblings, seed=11)
    await frontend.finish(key, siblings, deadline_s=ANSWER_S)
    return [frontend.answer(key, sibling) for sibling in siblings]


@pytest.mark.parametrize(
    ("kind", "changes", "feature"),
    [
        ("mistral", {"sliding_window": 64}, "sliding window attention"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            "dynamic RoPE",
        ),
    ],
)
async def test_a_model_that_would_be_computed_wrongly_ends_the_worker_with_one_line(
    kind: str, changes: dict[str, object], feature: str, models_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "refused"
    shutil.copytree(tiny_model(kind, models_dir), folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with worker_processes(tmp_path, [], [settings_for(folder)]) as (process,):
        assert await process.wait_exit(90.0) == 1
        *before, line = process.log.splitlines()
        assert all(entry.startswith("{") and '"exception"' not in entry for entry in before), process.log
        assert line.startswith("decode: ")
        assert feature in line
