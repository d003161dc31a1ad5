from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.geometry import KVGeometry
from pdserve.core.ids import AttemptKey, GroupId
from pdserve.engine.scripted import SCRIPTED_GEOMETRY
from pdserve.engine.work import Progress
from pdserve.wire.frames import FRAME_BYTES
from services.prefill.cursor import PushCursor

KEY = AttemptKey(GroupId(1, 1), 1)
LAYERS = 4
# A layer of one token fills a frame.
GEOMETRY = replace(SCRIPTED_GEOMETRY, num_layers=LAYERS, head_dim=FRAME_BYTES)


def computed(tokens: int, layers: int | None = None) -> Progress:
    return Progress(KEY, tokens, (), layers)


def cursor(*progress: Progress, held_tokens: int = 0, geometry: KVGeometry = GEOMETRY) -> PushCursor:
    cursor = PushCursor(held_tokens, geometry)
    for each in progress:
        cursor.extend(each)
    return cursor


def test_nothing_is_sent_before_anything_is_computed() -> None:
    assert cursor().take() is None


def test_a_whole_chunk_is_sent_at_once() -> None:
    sends = cursor(computed(20))
    assert sends.take() == (range(20), range(LAYERS))
    assert sends.take() is None
    assert sends.sent_tokens == 20


def test_layers_are_sent_as_they_come_and_the_rest_with_the_chunk() -> None:
    sends = cursor(computed(20, 1))
    assert sends.take() == (range(20), range(1))
    assert sends.take() is None
    sends.extend(computed(20, 2))
    sends.extend(computed(20, 3))
    assert sends.take() == (range(20), range(1, 3))
    assert sends.sent_tokens == 0
    sends.extend(computed(20))
    assert sends.take() == (range(20), range(3, LAYERS))
    assert sends.sent_tokens == 20


def test_layers_wait_until_they_fill_a_frame_or_are_the_last() -> None:
    """Two layers of twenty tokens are a frame."""
    geometry = replace(SCRIPTED_GEOMETRY, num_layers=LAYERS)
    geometry = replace(geometry, head_dim=geometry.head_dim * FRAME_BYTES // (2 * 20 * geometry.token_layer_bytes))
    sends = cursor(computed(20, 1), geometry=geometry)
    assert sends.take() is None
    sends.extend(computed(20, 2))
    assert sends.take() == (range(20), range(2))
    sends.extend(computed(20, 3))
    assert sends.take() is None
    sends.extend(computed(20))
    assert sends.take() == (range(20), range(2, LAYERS))


def test_what_decode_holds_is_not_sent() -> None:
    sends = cursor(computed(32), held_tokens=32)
    assert sends.take() is None
    sends.extend(computed(40, 2))
    assert sends.take() == (range(32, 40), range(2))


def test_a_chunk_is_finished_before_the_next_begins() -> None:
    sends = cursor(computed(20, 1))
    sends.take()
    sends.extend(computed(20))
    sends.extend(computed(40, 2))
    assert sends.take() == (range(20), range(1, LAYERS))
    assert sends.take() == (range(20, 40), range(2))
    assert sends.take() is None


def test_the_last_layer_told_of_is_no_less_than_the_chunk() -> None:
    sends = cursor(computed(20, LAYERS))
    assert sends.take() == (range(20), range(LAYERS))
    sends.extend(computed(20))
    assert sends.take() is None


@given(held=st.integers(0, 3), chunks=st.lists(st.integers(1, 5), min_size=1, max_size=5), chance=st.randoms())
def test_every_token_of_every_layer_is_sent_once_in_order_and_never_before_it_is_computed(
    held: int, chunks: list[int], chance: Random
) -> None:
    sends = PushCursor(held, GEOMETRY)
    sent = [held] * LAYERS
    ready = [0] * LAYERS
    end = 0

    def send_all() -> None:
        while (part := sends.take()) is not None:
            tokens, layers = part
            for layer in layers:
                assert tokens.start == sent[layer]
                assert tokens.stop <= ready[layer]
                sent[layer] = tokens.stop

    for chunk in chunks:
        end += chunk
        for layer in range(LAYERS):
            ready[layer] = end
            sends.extend(computed(end, layer + 1))
            if chance.random() < 0.5:
                send_all()
        sends.extend(computed(end))
        if chance.random() < 0.5:
            send_all()
    send_all()
    assert sent == [max(held, end)] * LAYERS
    assert sends.sent_tokens == max(held, end)
