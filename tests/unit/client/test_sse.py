"""Server-sent events, however their bytes are split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.client.sse import EventParser


def events_of(*pieces: bytes) -> list[str]:
    parser = EventParser()
    return [data for piece in pieces for data in parser.feed(piece)]


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_any_line_end_ends_a_line(end: bytes) -> None:
    # A lone CR at the very end might be half of a CRLF, and ends its line all the same.
    assert events_of(b"data: one" + end + end + b"data: two" + end + end) == ["one", "two"]


def test_an_event_counts_when_its_blank_line_has_come() -> None:
    parser = EventParser()
    assert parser.feed(b"data: [DONE]\n") == []
    assert parser.feed(b"\n") == ["[DONE]"]


def test_several_data_lines_are_one_event() -> None:
    assert events_of(b"data: one\ndata:two\ndata:  three\ndata\n\n") == ["one\ntwo\n three\n"]


def test_comments_names_ids_and_empty_events_are_no_events() -> None:
    assert events_of(b": keepalive\n\n:\n\nid: 1\n\nevent: ping\nretry: 5\n\n\n\ndata: x\n\n") == ["x"]


def test_a_byte_order_mark_is_no_data() -> None:
    assert events_of(b"\xef", b"\xbb", b"\xbfdata: x\n\n") == ["x"]
    assert events_of(b"data: \xef\xbb\xbf\n\n") == ["\ufeff"]


def test_characters_that_other_splitters_take_for_line_ends_are_data() -> None:
    assert events_of("data: a\u2028b\x85c\x0bd\n\n".encode()) == ["a\u2028b\x85c\x0bd"]


LINES = st.sampled_from(
    [b"data: h\xc3\xa9", "data: \U0001f600\u2028".encode(), b"data:", b": x", b"id: 1", b"", b"\xff"]
)
ENDS = st.sampled_from([b"\n", b"\r", b"\r\n"])


@given(st.lists(st.tuples(LINES, ENDS), max_size=12), st.data())
def test_no_split_changes_what_comes_out(lines: list[tuple[bytes, bytes]], data: st.DataObject) -> None:
    body = b"".join(line + end for line, end in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    assert events_of(*pieces) == events_of(body) == events_of(*(bytes([byte]) for byte in body))
