"""Stop strings: what is released never depends on how the text was split."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.frontend.stops import StopHit, StopMatcher


def search_all(text: str, stops: list[str], include: bool = False) -> tuple[str, StopHit | None]:
    """The oracle: look at everything at once; the earliest match wins, then the shortest."""
    hits = [StopHit(stop, text.find(stop), text.find(stop) + len(stop)) for stop in stops if stop in text]
    if not hits:
        return text, None
    hit = min(hits, key=lambda h: (h.start, h.end))
    return text[: hit.end if include else hit.start], hit


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, StopHit | None]:
    matcher = StopMatcher(stops, include)
    text = ""
    for piece in pieces:
        released, hit = matcher.push(piece)
        text += released
        if hit is not None:
            return text, hit
    released, hit = matcher.flush()
    return text + released, hit


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stop"),
    [
        (["hello ", "wor", "ld"], [], "hello world", None),
        (["hello ", "wor", "ld"], ["or"], "hello w", "or"),
        (["a", "b", "c"], ["c", "b"], "a", "b"),
        (["xabcx"], ["bc", "abc"], "x", "abc"),
        # What starts earlier wins even if it is complete later.
        (["ab", "c", "d"], ["bc", "abcd"], "", "abcd"),
        # … and if it is never complete, the later one has been a match all along.
        (["ab", "c", "x"], ["bc", "abcd"], "a", "bc"),
        (["ab", "c"], ["bc", "abcd"], "a", "bc"),
        (["abc"], ["abc", "ab"], "", "ab"),
        (["aab", "aac"], ["aabaac"], "", "aabaac"),
        (["aabaab", "aac"], ["aabaac"], "aab", "aabaac"),
        (["no stop, EN"], ["END"], "no stop, EN", None),
        (["👩", "\u200d", "👧"], ["\u200d👧"], "👩", "\u200d👧"),
    ],
)
def test_cuts_at_the_earliest_match(pieces: list[str], stops: list[str], text: str, stop: str | None) -> None:
    released, hit = run(pieces, stops)
    assert released == text
    assert (hit.stop if hit else None) == stop


def test_holds_back_only_what_could_still_become_a_stop() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("text ST") == ("text ", None)
    assert matcher.push("ONE S") == ("STONE ", None)
    assert matcher.flush() == ("S", None)


def test_a_match_that_nothing_can_precede_is_reported_at_once() -> None:
    matcher = StopMatcher(["stop", "opera"])
    assert matcher.push("a stop") == ("a ", StopHit("stop", 2, 6))


def test_the_stop_is_released_if_asked_for_and_nothing_after_it() -> None:
    assert run(["one STOP two"], ["STOP"], include=True) == ("one STOP", StopHit("STOP", 4, 8))


small_text = st.text(alphabet="ab", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


@settings(max_examples=300, derandomize=True)
@given(pieces=st.lists(small_text, max_size=12), stops=stop_lists, include=st.booleans())
@example(pieces=["a", "b", "a"], stops=["bb", "aba", "ab"], include=False)
def test_any_split_gives_what_searching_everything_gives(pieces: list[str], stops: list[str], include: bool) -> None:
    assert run(pieces, stops, include) == search_all("".join(pieces), stops, include)


@settings(max_examples=100, derandomize=True)
@given(pieces=st.lists(st.text(max_size=6), max_size=12), stops=st.lists(st.text(min_size=1, max_size=3), max_size=4))
def test_any_text_gives_what_searching_everything_gives(pieces: list[str], stops: list[str]) -> None:
    assert run(pieces, stops) == search_all("".join(pieces), stops)


@settings(max_examples=100, derandomize=True)
@given(pieces=st.lists(small_text, max_size=12), stops=stop_lists)
def test_released_text_is_never_taken_back_and_held_text_is_short(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    pushed = released = ""
    longest = max(map(len, stops), default=0)
    for piece in pieces:
        text, hit = matcher.push(piece)
        pushed, released = pushed + piece, released + text
        assert pushed.startswith(released)
        if hit is not None:
            return
        assert len(pushed) - len(released) < max(longest, 1)


def test_steps_do_not_grow_with_the_stop_string() -> None:
    """A stop string as long as the text, which matches all but its last character again and again."""
    stop = "a" * 50_000 + "b"
    assert run(["a" * 1000] * 200, [stop]) == ("a" * 200_000, None)
