"""One choice's text: deltas, stop strings, and which token belongs where."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.events import TokenLogprobs
from services.frontend.detokenizer import DecodingPlan, Detokenizer
from services.frontend.text import ChoiceText, TextDelta
from tests.tiny_tokenizers import CORPUS, KINDS, byte_level_bpe


def run(choice: ChoiceText, ids: list[int]) -> list[TextDelta]:
    """Push until the text stops or ids run out; the last delta is `finish`'s."""
    deltas = []
    for token_id in ids:
        delta = choice.push(token_id)
        if delta is not None:
            deltas.append(delta)
        if choice.stopped:
            break
    return [*deltas, choice.finish()]


def byte_ids(*texts: str) -> tuple[DecodingPlan, list[int]]:
    """A byte-level tokenizer and the tokens of each text, one after the other."""
    backend = byte_level_bpe()
    return DecodingPlan(backend), [token_id for text in texts for token_id in backend.encode(text).ids]


def test_no_delta_but_the_last_is_empty() -> None:
    plan, ids = byte_ids(" ".join(CORPUS))
    *deltas, _ = run(ChoiceText(plan, []), ids)
    assert all(delta.text for delta in deltas)


def test_the_stop_string_ends_the_text_and_the_count() -> None:
    plan, ids = byte_ids(*"one STOP two")
    choice = ChoiceText(plan, [], stops=["OP"])
    deltas = run(choice, ids)
    assert "".join(delta.text for delta in deltas) == "one ST"
    assert (choice.stopped, choice.stop) == (True, "OP")
    assert choice.num_tokens == len(byte_ids(*"one STOP")[1])
    assert sum(len(delta.tokens) for delta in deltas) == choice.num_tokens


def test_the_stop_string_is_kept_if_asked_for() -> None:
    plan, ids = byte_ids(*"one STOP two")
    assert "".join(d.text for d in run(ChoiceText(plan, [], stops=["OP"], include_stop=True), ids)) == "one STOP"


def test_tokens_that_came_while_an_earlier_match_was_possible_do_not_count() -> None:
    plan, ids = byte_ids(*"a1234x")
    choice = ChoiceText(plan, [], stops=["234y", "3"])
    deltas = run(choice, ids)
    assert "".join(delta.text for delta in deltas) == "a12"
    assert choice.num_tokens == len(byte_ids(*"a123")[1])


def test_held_text_is_released_at_the_end() -> None:
    plan, ids = byte_ids("one ST")
    choice = ChoiceText(plan, [], stops=["STOP"])
    *deltas, last = run(choice, ids)
    assert "".join(delta.text for delta in deltas) == "one "
    assert (last.text, choice.stopped) == ("ST", False)


def test_a_stop_string_that_only_the_flush_completes_counts() -> None:
    plan, ids = byte_ids("a😀")
    choice = ChoiceText(plan, [], stops=["\N{REPLACEMENT CHARACTER}"])
    deltas = run(choice, ids[:-1])
    assert ("".join(delta.text for delta in deltas), choice.stopped) == ("a", True)


def test_a_stop_token_has_no_text_unless_stops_are_kept() -> None:
    plan, (end,) = byte_ids("<|im_end|>")
    for include, text in ((False, ""), (True, "<|im_end|>")):
        choice = ChoiceText(plan, [], include_stop=include, skip_special_tokens=False)
        delta = choice.push(end, stop_token=True)
        assert (delta.text if delta else "") + choice.finish().text == text
        assert choice.num_tokens == 1


def test_the_first_min_tokens_are_not_searched() -> None:
    plan, ids = byte_ids(*"1212")
    choice = ChoiceText(plan, [], stops=["2"], min_tokens=2)
    assert "".join(delta.text for delta in run(choice, ids)) == "121"
    assert choice.num_tokens == 4


def test_a_token_belongs_to_the_delta_that_releases_its_first_character() -> None:
    plan, ids = byte_ids(*"1😀2345")
    deltas = run(ChoiceText(plan, [], stops=["34!"]), ids)
    emoji = [token_id for token_id in ids if token_id not in byte_ids(*"12345")[1]]
    assert [(delta.text, [token.token_id for token in delta.tokens]) for delta in deltas] == [
        ("1", byte_ids("1")[1]),
        ("😀", emoji),
        ("2", byte_ids("2")[1]),
        ("345", byte_ids(*"345")[1]),
        ("", []),
    ]


def test_offsets_say_where_each_tokens_text_begins() -> None:
    plan, ids = byte_ids(*"1😀2")
    tokens = [token for delta in run(ChoiceText(plan, []), ids) for token in delta.tokens]
    assert [token.offset for token in tokens] == [0, *[1] * (len(ids) - 2), 2]


def test_logprobs_stay_with_their_token() -> None:
    plan, ids = byte_ids(*"12")
    choice = ChoiceText(plan, [], stops=["12!"])
    for rank, token_id in enumerate(ids):
        assert choice.push(token_id, TokenLogprobs(-float(rank))) is None
    assert [(t.token_id, t.logprobs) for t in choice.finish().tokens] == [
        (ids[0], TokenLogprobs(-0.0)),
        (ids[1], TokenLogprobs(-1.0)),
    ]


def test_nothing_may_follow_a_stop() -> None:
    plan, ids = byte_ids(*"12")
    choice = ChoiceText(plan, [], stops=["1"])
    choice.push(ids[0])
    with pytest.raises(RuntimeError):
        choice.push(ids[1])


@pytest.mark.parametrize("kind", KINDS)
def test_invariant_2_streamed_text_equals_searching_all_of_the_decoded_text(kind: str) -> None:
    """Text, stop string and token count against the obvious implementation."""
    backend = KINDS[kind]()
    plan = DecodingPlan(backend)
    ids = st.lists(st.integers(0, backend.get_vocab_size() - 1), max_size=16)

    @settings(max_examples=60, derandomize=True, database=None)
    @given(ids=ids | st.sampled_from(CORPUS).map(lambda text: backend.encode(text).ids[:24]), data=st.data())
    def check(ids: list[int], data: st.DataObject) -> None:
        whole = backend.decode(ids)
        some_text = st.integers(0, max(len(whole) - 1, 0)).flatmap(
            lambda start: st.integers(1, 4).map(lambda size: whole[start : start + size] or "x")
        )
        stops = data.draw(st.lists(some_text | st.text(min_size=1, max_size=3), max_size=4))
        choice = ChoiceText(plan, [], stops=stops)
        deltas = run(choice, ids)

        hits = [(whole.find(stop), len(stop), stop) for stop in stops if stop in whole]
        assert "".join(delta.text for delta in deltas) == (whole[: min(hits)[0]] if hits else whole)
        assert choice.stop == (min(hits)[2] if hits else None)
        assert [t.token_id for d in deltas for t in d.tokens] == ids[: choice.num_tokens]
        if hits:
            assert choice.num_tokens == _count_until(plan, ids, sum(min(hits)[:2]))

    check()


def _count_until(plan: DecodingPlan, ids: list[int], end: int) -> int:
    """Tokens until the decoded text has `end` characters."""
    detokenizer = Detokenizer(plan)
    length = 0
    for count, token_id in enumerate(ids, 1):
        length += len(detokenizer.push(token_id))
        if length >= end:
            return count
    return len(ids)
