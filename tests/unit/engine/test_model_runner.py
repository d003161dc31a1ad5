"""The runner equals transformers' `generate` for every supported architecture, alone and in any batch."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.core.errors import StartupError
from pdserve.engine.interfaces import Bytes
from pdserve.engine.model_runner import TorchModelRunner
from pdserve.engine.work import BlockCopy, ScoreSpec, SequenceSlice
from tests.steps import GREEDY, Oracle, generate, sample_spec
from tests.tiny_models import KINDS, tiny_model

CHUNK = 32
# Around the edges of blocks (16) and chunks.
LENGTHS = (1, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 100)
Runners = Callable[[str], TorchModelRunner]
Oracles = Callable[[str], Oracle]


def _prompts() -> list[list[int]]:
    random = np.random.default_rng(2)
    return [random.integers(2, 320, length).tolist() for length in LENGTHS]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_equals_generate(kind: str, tiny_runner: Runners, tiny_oracle: Oracles) -> None:
    runner, prompts = tiny_runner(kind), _prompts()
    expected = [tiny_oracle(kind).continuation(prompt, 12) for prompt in prompts]
    together = generate(runner, prompts, 12, CHUNK)
    assert [e.accepts(t) for e, t in zip(expected, together, strict=True)] == [True] * len(prompts)
    alone = [generate(runner, [prompt], 12, CHUNK)[0] for prompt in prompts]
    assert [e.accepts(t) for e, t in zip(expected, alone, strict=True)] == [True] * len(prompts)


def test_tiny_models_do_not_merely_repeat(tiny_oracle: Oracles) -> None:
    assert all(len(set(tiny_oracle(kind).continuation(_prompts()[-1], 12).token_ids)) > 3 for kind in KINDS)


def test_siblings_draw_from_one_row(tiny_runner: Runners) -> None:
    prompt = _prompts()[3]
    hot = replace(GREEDY, temperature=2.0)
    specs = tuple(replace(sample_spec(prompt, len(prompt), hot), sibling=sibling) for sibling in range(8))
    part = SequenceSlice(np.array(prompt, np.int32), 0, (4, 2), specs)
    (first,) = tiny_runner("llama").run([part], ())
    (again,) = tiny_runner("llama").run([part], ())
    assert first == again
    assert len({token.token_id for token in first}) > 1


def test_a_copied_block_continues_like_its_source(tiny_runner: Runners) -> None:
    runner, prompt = tiny_runner("llama"), _prompts()[3]
    spec = sample_spec([*prompt, 5], len(prompt))
    runner.run([SequenceSlice(np.array(prompt, np.int32), 0, (7, 8))], ())
    step = SequenceSlice(np.array([5], np.int32), len(prompt), (7, 8), (spec,))
    forked = replace(step, block_ids=(7, 9))
    assert runner.run([forked], [BlockCopy(8, 9)]) == runner.run([step], ())


def test_a_step_without_samples_returns_none(tiny_runner: Runners) -> None:
    assert tiny_runner("llama").run([SequenceSlice(np.array([5, 6], np.int32), 0, (0,))], ()) == [[]]
    assert tiny_runner("llama").run([], ()) == []


def test_a_layer_that_is_told_of_is_in_the_cache(tiny_runner: Runners) -> None:
    """What is read in the middle of a step is what the step leaves."""
    runner, prompt = tiny_runner("llama"), _prompts()[3]
    layers = range(runner.geometry.num_layers)
    runner.pool.write(
        (7, 8), range(len(prompt)), layers, np.zeros_like(runner.pool.read((7, 8), range(len(prompt)), layers))
    )
    told: list[Bytes] = []

    def read(num_layers: int) -> None:
        assert num_layers == len(told) + 1
        told.append(runner.pool.read((7, 8), range(len(prompt)), range(num_layers)))

    runner.run([SequenceSlice(np.array(prompt, np.int32), 0, (7, 8))], (), read)
    assert len(told) == len(layers)
    for num_layers, seen in enumerate(told, 1):
        assert np.array_equal(seen, runner.pool.read((7, 8), range(len(prompt)), range(num_layers)))


def test_handed_over_bytes_continue_like_computed_ones(tiny_runner: Runners) -> None:
    runner, prompt = tiny_runner("qwen3"), _prompts()[-1]
    layers = range(runner.geometry.num_layers)
    source, target = tuple(range(10, 17)), tuple(range(40, 47))
    runner.run([SequenceSlice(np.array(prompt, np.int32), 0, source)], ())
    for tokens in (range(37), range(37, len(prompt))):
        runner.pool.write(target, tokens, layers, runner.pool.read(source, tokens, layers))
    step = SequenceSlice(np.array([5], np.int32), len(prompt), source, (sample_spec([*prompt, 5], len(prompt)),))
    assert runner.run([replace(step, block_ids=target)], ()) == runner.run([step], ())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 7, CHUNK, 200])
def test_scored_tokens_have_the_references_logprobs(
    kind: str, chunk: int, tiny_runner: Runners, tiny_oracle: Oracles
) -> None:
    runner, prompt = tiny_runner(kind), _prompts()[-1]
    expected = tiny_oracle(kind).prompt_logprobs(prompt)
    other = SequenceSlice(np.array(_prompts()[3], np.int32), 0, (50, 51), (sample_spec(_prompts()[3], 17),))
    token_ids, block_ids = np.array(prompt, np.int32), tuple(range(30, 37))
    scored = []
    for start in range(0, len(prompt), chunk):
        end = min(start + chunk, len(prompt))
        samples = (sample_spec(prompt, len(prompt)),) if end == len(prompt) else ()
        scores = ScoreSpec(token_ids[start + 1 : end + 1], 3)
        part = SequenceSlice(token_ids[start:end], start, block_ids, samples, scores)
        _, row = runner.run([other, part], ())
        assert len(row) == part.num_scored + len(samples)
        scored += row[: part.num_scored]
    assert [result.token_id for result in scored] == prompt[1:]
    for result, reference in zip(scored, expected, strict=True):
        assert result.logprobs is not None
        assert result.logprobs.logprob == pytest.approx(float(reference[result.token_id]), abs=2e-4)
        assert result.logprobs.top_logprobs == pytest.approx(reference.topk(3).values.tolist(), abs=2e-4)


def test_bfloat16_caches_are_half_as_large(models_dir: Path) -> None:
    folder = tiny_model("llama", models_dir)
    runner, wide = (
        TorchModelRunner.within_memory(folder, dtype, "cpu", kv_cache_bytes=1 << 20)
        for dtype in ("bfloat16", "float32")
    )
    assert runner.pool.num_blocks == 2 * wide.pool.num_blocks
    assert runner.pool.num_blocks * runner.geometry.block_bytes == 1 << 20
    assert len(generate(runner, [_prompts()[-1]], 4)[0]) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float32", "device": "cpu", "num_blocks": 3}, "less than 256 tokens"),
        ({"dtype": "float32", "device": "cuda", "num_blocks": 64}, "no CUDA device"),
        ({"dtype": "float32", "device": "abacus", "num_blocks": 64}, "unknown device abacus"),
        ({"dtype": "float16", "device": "cpu", "num_blocks": 64}, "float16 needs a GPU"),
        ({"dtype": "int4", "device": "cpu", "num_blocks": 64}, "unknown dtype int4"),
        ({"dtype": "float32", "device": "cpu", "num_blocks": 1 << 40}, "no memory for a KV cache"),
    ],
)
def test_what_cannot_start_says_why(arguments: dict[str, object], message: str, models_dir: Path) -> None:
    if arguments["device"] == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(StartupError, match=message) as error:
        TorchModelRunner(tiny_model("llama", models_dir), **arguments)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_a_refused_model_is_named_before_its_weights_are_read(models_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "windowed"
    shutil.copytree(tiny_model("mistral", models_dir), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 64}))
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(StartupError, match="sliding window attention"):
        TorchModelRunner(folder, "float32", "cpu", 64)


def test_lacking_weights_are_a_startup_error(models_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lacking"
    shutil.copytree(tiny_model("llama", models_dir), folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match=r"lack model\.norm\.weight"):
        TorchModelRunner(folder, "float32", "cpu", 64)


def test_broken_weights_are_a_startup_error(models_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(tiny_model("llama", models_dir), folder)
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(StartupError, match="cannot load the weights"):
        TorchModelRunner(folder, "float32", "cpu", 64)
