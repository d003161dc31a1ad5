"""Frames: how a KV cache is cut into pieces, and how a piece proves that it is whole, right and in order.

A frame's bytes are a rectangle of the cache in canonical order, [layers, 2 (key, value), heads, tokens, head_dim].
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.geometry import KVGeometry
from pdserve.rpc.v1.kv_pb2 import Frame

FRAME_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FrameSpan:
    """The rectangle of a frame: these layers of these tokens, with all KV heads."""

    layers: range
    tokens: range

    def num_bytes(self, geometry: KVGeometry) -> int:
        return len(self.layers) * len(self.tokens) * geometry.token_layer_bytes

    def __str__(self) -> str:
        layers, tokens = self.layers, self.tokens
        return f"layers {layers.start} to {layers.stop}, tokens {tokens.start} to {tokens.stop}"


def frame_spans(
    geometry: KVGeometry, tokens: range, layers: range, frame_bytes: int = FRAME_BYTES
) -> Iterator[FrameSpan]:
    """Cut these layers of these tokens into frames of nearly equal size, at most `frame_bytes` each.

    A frame takes whole layers of all the tokens where that fits; otherwise each layer's tokens are split, at the ends of
    blocks if a block fits. One token of one layer is the least that a frame holds.
    """
    if not tokens or not layers:
        return
    if layers_fit := layers_per_frame(geometry, len(tokens), frame_bytes):
        for together in _split(layers, layers_fit):
            yield FrameSpan(together, tokens)
        return
    tokens_fit = max(1, frame_bytes // geometry.token_layer_bytes)
    if tokens_fit >= geometry.block_size:
        tokens_fit -= tokens_fit % geometry.block_size
    for layer in layers:
        for start in range(tokens.start, tokens.stop, tokens_fit):
            yield FrameSpan(range(layer, layer + 1), tokens[start - tokens.start :][:tokens_fit])


def layers_per_frame(geometry: KVGeometry, num_tokens: int, frame_bytes: int = FRAME_BYTES) -> int:
    """How many whole layers of so many tokens fit in a frame; 0 if not even one does."""
    return frame_bytes // (geometry.token_layer_bytes * num_tokens)


def _split(whole: range, most: int) -> Iterator[range]:
    """As few parts as parts of at most `most` allow, of lengths that differ by one at most."""
    parts = -(-len(whole) // most)
    edges = [whole.start + len(whole) * i // parts for i in range(parts + 1)]
    yield from map(range, edges, edges[1:])


def encode_frame(
    span: FrameSpan,
    geometry: KVGeometry,
    nonce: int,
    data: bytes | memoryview | NDArray[np.uint8],
    frame: Frame | None = None,
) -> Frame:
    """A frame of `data`, [bytes] contiguous in canonical order.

    Args:
        nonce: of the ticket that the frame is pushed with; it seeds the checksum.
        frame: filled in place, so that the payload is not copied again into the message that holds it.
    Raises:
        ValueError: `data` isn't as long as the span says.
    """
    payload = data if isinstance(data, bytes) else data.tobytes()
    if len(payload) != span.num_bytes(geometry):
        raise ValueError(f"{len(payload)} bytes for {span}, which take {span.num_bytes(geometry)}")
    if frame is None:
        frame = Frame()
    frame.layer_start, frame.layer_count = span.layers.start, len(span.layers)
    frame.token_start, frame.token_count = span.tokens.start, len(span.tokens)
    frame.head_start, frame.head_count = 0, geometry.num_kv_heads
    frame.codec = geometry.codec
    frame.checksum = xxh3_64_intdigest(payload, nonce)
    frame.data = payload
    return frame


def verify_frame(frame: Frame, geometry: KVGeometry, nonce: int) -> FrameSpan:
    """What the frame covers, once it is proved that its bytes are what was sent for the ticket with this nonce.

    Raises:
        PdserveError: bad_frame; names what is wrong.
    """
    if frame.codec != geometry.codec:
        raise _bad(f"codec {frame.codec[:50]!r}, not {geometry.codec!r}")
    if not frame.layer_count or frame.layer_start + frame.layer_count > geometry.num_layers:
        raise _bad(f"{frame.layer_count} layers from {frame.layer_start}, of {geometry.num_layers}")
    if not frame.token_count:
        raise _bad("no tokens")
    if (frame.head_start, frame.head_count) != (0, geometry.num_kv_heads):
        raise _bad(
            f"{frame.head_count} KV heads from {frame.head_start}: a part of the {geometry.num_kv_heads} heads "
            "cannot be taken"
        )
    span = FrameSpan(
        layers=range(frame.layer_start, frame.layer_start + frame.layer_count),
        tokens=range(frame.token_start, frame.token_start + frame.token_count),
    )
    data = frame.data
    if len(data) != span.num_bytes(geometry):
        raise _bad(f"{len(data)} bytes for {span}, which take {span.num_bytes(geometry)}")
    if xxh3_64_intdigest(data, nonce) != frame.checksum:
        raise _bad(f"wrong checksum for {span}")
    return span


class Coverage:
    """How far each layer of a cache has arrived. Each layer's tokens come in order, each of them once."""

    def __init__(self, geometry: KVGeometry, start_token: int, end_token: int) -> None:
        """Expect tokens `start_token` … `end_token` - 1 of every layer."""
        self._start_token = start_token
        self._end_token = end_token
        # Token that each layer expects next.
        self._next_tokens = [start_token] * geometry.num_layers

    def add(self, span: FrameSpan) -> None:
        """Count a verified frame in.

        Raises:
            PdserveError: bad_frame; the span leaves a gap, repeats tokens, or reaches beyond the end. Nothing is counted.
        """
        for layer in span.layers:
            if span.tokens.start != self._next_tokens[layer]:
                raise _bad(f"{span}: layer {layer} expects token {self._next_tokens[layer]} next")
        if span.tokens.stop > self._end_token:
            raise _bad(f"{span}: the cache ends at token {self._end_token}")
        for layer in span.layers:
            self._next_tokens[layer] = span.tokens.stop

    @property
    def complete(self) -> bool:
        """Whether every token of every layer has arrived."""
        return all(token == self._end_token for token in self._next_tokens)

    def __str__(self) -> str:
        arrived = min(self._next_tokens, default=self._end_token)
        return f"{arrived - self._start_token} of {self._end_token - self._start_token} tokens in every layer"


def _bad(message: str) -> PdserveError:
    return PdserveError(ErrorCode.bad_frame, f"bad frame: {message}")
