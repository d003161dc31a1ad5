"""CUDA graphs on a GPU: they compute what the same steps compute operator by operator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.core.events import Token
from pdserve.engine import decode_graphs
from pdserve.engine.engine import Engine
from pdserve.engine.model_runner import TorchModelRunner
from pdserve.engine.settings import SchedulerSettings
from tests.batches import MIXED_ARRIVALS, Arrival, serve
from tests.tiny_models import KINDS, tiny_model

pytestmark = pytest.mark.gpu
MAX_ROWS = 16
# Two log-probabilities in bfloat16 that are closer than this may change places by rounding.
TIE = 0.1


@dataclass
class UncapturedWork:
    """Runs the same padded step from the same buffers, operator by operator."""

    replay: Callable[[], None]


def no_capture(device: object) -> Callable[[Callable[[], None]], UncapturedWork]:
    return UncapturedWork


def make_engine(folder: Path, dtype: str, max_graph_rows: int = MAX_ROWS) -> Engine:
    runner = TorchModelRunner(folder, dtype, "cuda", num_blocks=40, max_graph_rows=max_graph_rows)
    return Engine(runner, SchedulerSettings(step_tokens=64, max_sequences=MAX_ROWS))


def has_graphs(engine: Engine) -> bool:
    assert isinstance(engine.runner, TorchModelRunner)
    return engine.runner._graphs is not None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_replays_equal_the_same_steps_uncaptured(
    kind: str, dtype: str, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model(kind, models_dir)
    captured = make_engine(folder, dtype)
    monkeypatch.setattr(decode_graphs, "CudaCapture", no_capture)
    uncaptured = make_engine(folder, dtype)
    assert has_graphs(captured)
    assert serve(captured).token_ids == serve(uncaptured).token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_on_equal_graphs_off(kind: str, models_dir: Path) -> None:
    """Prompts between decode steps, a batch that grows and shrinks, cancellations: see MIXED_ARRIVALS.

    Padding changes the size of matrix products, which may round otherwise: a first difference counts only where the
    best two tokens were further apart than rounding.
    """
    folder = tiny_model(kind, models_dir)
    on, off = (make_engine(folder, "bfloat16", rows) for rows in (MAX_ROWS, 0))
    assert has_graphs(on)
    assert not has_graphs(off)
    got, wanted = serve(on, top_logprobs=2).tokens, serve(off, top_logprobs=2).tokens
    assert got.keys() == wanted.keys()
    assert all(accepts(wanted[sequence], got[sequence]) for sequence in wanted)


def accepts(wanted: Sequence[Token], got: Sequence[Token]) -> bool:
    """Equal, or first different where the two best were at a tie."""
    assert len(wanted) == len(got)
    for expected, token in zip(wanted, got, strict=True):
        if expected.token_id != token.token_id:
            assert expected.logprobs is not None
            best, second = expected.logprobs.top_logprobs
            return best - second < TIE
    return True


def test_a_batch_without_padding_is_equal_to_the_last_bit(models_dir: Path) -> None:
    folder = tiny_model("llama", models_dir)
    # Siblings start and end together: each decode step has four rows, which is a graph's size.
    arrivals = [Arrival(0, 250, 40, siblings=4)]
    on, off = (serve(make_engine(folder, "bfloat16", rows), arrivals, top_logprobs=5) for rows in (4, 0))
    assert on.tokens == off.tokens


def test_a_second_run_finds_nothing_of_the_first(models_dir: Path) -> None:
    engine = make_engine(tiny_model("llama", models_dir), "bfloat16")
    alone = [Arrival(0, 30, 20)]
    fresh = serve(engine, alone).token_ids
    serve(engine, MIXED_ARRIVALS)
    assert serve(engine, alone).token_ids == fresh


def test_float32_runs_without_graphs(models_dir: Path) -> None:
    engine = make_engine(tiny_model("llama", models_dir), "float32")
    assert not has_graphs(engine)
    assert len(serve(engine, [Arrival(0, 20, 8)]).token_ids[0, 0]) == 8
