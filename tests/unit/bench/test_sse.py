"""Events come out whole and in order, however the bytes were read."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bench.sse import EventSplitter

PAYLOADS = [b'{"a": 1}', "grüße \N{WAVING HAND SIGN}".encode(), b"[DONE]"]


def encoded(line_end: bytes) -> bytes:
    return b"".join(b"data: " + payload + 2 * line_end for payload in PAYLOADS)


@given(st.lists(st.integers(0, 80), max_size=8), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_an_event_may_be_split_across_reads_anywhere(cuts: list[int], line_end: bytes) -> None:
    stream = encoded(line_end) + b": end\n\n"
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    splitter = EventSplitter()
    got = [payload for start, end in pairwise(edges) for payload in splitter.feed(stream[start:end])]
    assert got == PAYLOADS
    assert not splitter.pending


def test_comments_and_other_fields_are_not_payloads() -> None:
    assert EventSplitter().feed(b": keepalive\n\nid: 7\n\nevent: token\ndata:x\n\n") == [b"x"]


def test_lines_of_one_event_are_joined() -> None:
    assert EventSplitter().feed(b"data: a\ndata: b\n\n") == [b"a\nb"]


def test_an_unfinished_event_is_pending_not_a_payload() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n\ndata: b\n") == [b"a"]
    assert splitter.pending
