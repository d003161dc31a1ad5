import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.geometry import KVGeometry
from pdserve.rpc.v1.kv_pb2 import Frame
from pdserve.wire.frames import Coverage, FrameSpan, encode_frame, frame_spans, verify_frame

NONCE = 2**63 + 5


def geometry(*, num_layers: int = 3, num_kv_heads: int = 2, head_dim: int = 4, dtype: str = "float16") -> KVGeometry:
    return KVGeometry("abc", "", dtype, "raw", num_layers, num_kv_heads, head_dim, block_size=16)


GEOMETRY = geometry()
SPAN = FrameSpan(range(1, 3), range(16, 21))
DATA = np.random.default_rng(0).integers(0, 256, SPAN.num_bytes(GEOMETRY), dtype=np.uint8)


def frame() -> Frame:
    return encode_frame(SPAN, GEOMETRY, NONCE, DATA)


def refused(bad: Frame, *, match: str, nonce: int = NONCE, of: KVGeometry = GEOMETRY) -> None:
    with pytest.raises(PdserveError, match=match) as refusal:
        verify_frame(bad, of, nonce)
    assert refusal.value.code is ErrorCode.bad_frame


@given(
    num_layers=st.integers(1, 40),
    start=st.integers(0, 1000),
    count=st.integers(0, 300),
    frame_bytes=st.integers(1, 4000),
    ahead=st.integers(0, 40),
)
def test_spans_cover_every_token_of_every_layer_once_and_in_order(
    num_layers: int, start: int, count: int, frame_bytes: int, ahead: int
) -> None:
    shape = geometry(num_layers=num_layers)
    coverage = Coverage(shape, start, start + count)
    tokens = range(start, start + count)
    layers = range(num_layers)
    spans = list(frame_spans(shape, tokens, layers[:ahead], frame_bytes))
    spans += frame_spans(shape, tokens, layers[ahead:], frame_bytes)
    for span in spans:
        assert span.num_bytes(shape) <= frame_bytes or len(span.layers) == len(span.tokens) == 1
        assert span.num_bytes(shape) > 0
        coverage.add(span)
    assert coverage.complete
    sizes = [span.num_bytes(shape) for span in frame_spans(shape, tokens, layers, frame_bytes)]
    # Either whole layers are grouped, or single layers are split.
    assert all(len(s.tokens) == count for s in spans) or all(len(s.layers) == 1 for s in spans)
    if sizes:
        assert max(sizes) - min(sizes) <= max(count, 1) * shape.token_layer_bytes


def test_frames_of_a_real_shape_are_near_a_mebibyte() -> None:
    llama_8b = geometry(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    sizes = [span.num_bytes(llama_8b) for span in frame_spans(llama_8b, range(512), range(llama_8b.num_layers))]
    assert sum(sizes) == 512 * 32 * llama_8b.token_layer_bytes
    assert min(sizes) > 1 << 19
    assert max(sizes) <= 1 << 20


def test_small_caches_travel_in_one_frame() -> None:
    assert list(frame_spans(GEOMETRY, range(16, 20), range(3))) == [FrameSpan(range(3), range(16, 20))]


def test_a_frame_says_what_it_covers() -> None:
    assert verify_frame(frame(), GEOMETRY, NONCE) == SPAN


@pytest.mark.parametrize("data", [DATA.tobytes(), memoryview(DATA), DATA])
def test_any_buffer_makes_the_same_frame(data: bytes | memoryview) -> None:
    assert encode_frame(SPAN, GEOMETRY, NONCE, data) == frame()


@pytest.mark.parametrize("size", [0, len(DATA) - 1, len(DATA) + 1])
def test_bytes_that_do_not_fit_their_span_are_not_sent(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes for layers 1 to 3, tokens 16 to 21"):
        encode_frame(SPAN, GEOMETRY, NONCE, bytes(size))


def test_a_flipped_bit_in_any_byte_of_the_data_is_detected() -> None:
    for index in range(len(DATA)):
        flipped = DATA.copy()
        flipped[index] ^= 1 << (index % 8)
        bad = frame()
        bad.data = flipped.tobytes()
        refused(bad, match="wrong checksum")


def test_a_flipped_bit_in_any_byte_of_the_message_is_detected() -> None:
    """What cannot be told from the frame alone lies outside the order that is expected."""
    whole = frame().SerializeToString()
    for index in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[index] ^= 1 << bit
            coverage = Coverage(GEOMETRY, 16, 21)
            coverage.add(FrameSpan(range(1), range(16, 21)))
            try:
                coverage.add(verify_frame(Frame.FromString(bytes(flipped)), GEOMETRY, NONCE))
            except (DecodeError, PdserveError):
                continue
            assert not coverage.complete, (index, bit)


@pytest.mark.parametrize("size", [0, 1, len(DATA) - 1, len(DATA) + 1])
def test_a_cut_or_grown_frame_is_detected(size: int) -> None:
    bad = frame()
    bad.data = (bad.data + b"\0")[:size]
    refused(bad, match=f"{size} bytes for layers 1 to 3, tokens 16 to 21, which take {len(DATA)}")


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("codec", "fp8", "codec 'fp8', not 'raw'"),
        ("layer_count", 0, "0 layers from 1"),
        ("layer_count", 3, "3 layers from 1, of 3"),
        ("layer_start", 2, "2 layers from 2, of 3"),
        ("layer_start", 2**32 - 1, "layers from 4294967295"),
        ("token_count", 0, "no tokens"),
        ("token_count", 2**32 - 1, "bytes for layers"),
        ("head_start", 1, "2 KV heads from 1: a part of the 2 heads cannot be taken"),
        ("head_count", 1, "1 KV heads from 0: a part of the 2 heads cannot be taken"),
        ("head_count", 0, "0 KV heads"),
        ("checksum", 0, "wrong checksum for layers 1 to 3, tokens 16 to 21"),
    ],
)
def test_a_bad_field_is_named(field: str, value: int | str, match: str) -> None:
    bad = frame()
    setattr(bad, field, value)
    refused(bad, match=match)


def test_a_frame_of_another_ticket_is_detected() -> None:
    refused(frame(), match="wrong checksum", nonce=NONCE + 1)


def test_a_frame_of_another_geometry_is_detected() -> None:
    refused(frame(), match="bytes for", of=geometry(dtype="float32"))


class TestCoverage:
    def spans(self) -> list[FrameSpan]:
        """Three layers, each in two parts."""
        return list(frame_spans(GEOMETRY, range(16, 48), range(GEOMETRY.num_layers), GEOMETRY.token_layer_bytes * 16))

    def refused(self, coverage: Coverage, span: FrameSpan, match: str) -> None:
        with pytest.raises(PdserveError, match=match) as refusal:
            coverage.add(span)
        assert refusal.value.code is ErrorCode.bad_frame

    def test_is_complete_with_the_last_span_and_not_before(self) -> None:
        coverage = Coverage(GEOMETRY, 16, 48)
        for span in self.spans():
            assert not coverage.complete
            coverage.add(span)
        assert coverage.complete

    def test_of_nothing_is_complete(self) -> None:
        assert Coverage(GEOMETRY, 16, 16).complete

    def test_refuses_a_repeat(self) -> None:
        coverage = Coverage(GEOMETRY, 16, 48)
        first = self.spans()[0]
        coverage.add(first)
        self.refused(coverage, first, "layer 0 expects token 32 next")

    def test_refuses_a_gap(self) -> None:
        self.refused(Coverage(GEOMETRY, 16, 48), self.spans()[1], "layer 0 expects token 16 next")

    def test_refuses_what_reaches_beyond_the_end(self) -> None:
        span = FrameSpan(range(1), range(16, 49))
        self.refused(Coverage(GEOMETRY, 16, 48), span, "the cache ends at token 48")

    def test_refuses_what_is_held_already(self) -> None:
        self.refused(Coverage(GEOMETRY, 32, 48), self.spans()[0], "layer 0 expects token 32 next")

    def test_counts_nothing_of_a_span_that_is_bad_in_one_layer(self) -> None:
        coverage = Coverage(GEOMETRY, 16, 48)
        coverage.add(FrameSpan(range(2, 3), range(16, 32)))
        self.refused(coverage, FrameSpan(range(3), range(16, 48)), "layer 2 expects token 32 next")
        coverage.add(FrameSpan(range(2), range(16, 48)))
        coverage.add(FrameSpan(range(2, 3), range(32, 48)))
        assert coverage.complete

    def test_layers_may_advance_at_different_speeds(self) -> None:
        coverage = Coverage(GEOMETRY, 16, 48)
        for span in reversed([s for s in self.spans() if s.tokens.start == 16]):
            coverage.add(span)
        assert str(coverage) == "16 of 32 tokens in every layer"

    @given(data=st.data())
    def test_any_change_of_the_order_within_a_layer_is_detected(self, data: st.DataObject) -> None:
        spans = self.spans()
        order = data.draw(st.permutations(spans))[: data.draw(st.integers(0, len(spans)))]
        in_order = all(
            got == expected[: len(got)]
            for layer in range(3)
            for got, expected in [([s for s in some if layer in s.layers] for some in (order, spans))]
        )
        coverage = Coverage(GEOMETRY, 16, 48)
        try:
            for span in order:
                coverage.add(span)
        except PdserveError:
            assert not in_order
        else:
            assert in_order
            assert coverage.complete == (len(order) == len(spans))
