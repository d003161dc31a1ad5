"""A choice takes tokens in order and gives its reader everything once, however late it looks."""

from pdserve.core.events import FinishReason, Token
from pdserve.core.ids import AttemptKey, GroupId
from services.frontend.choices import Choice
from services.frontend.text import ChoiceText
from tests.frontend_stack import TOKENIZER, ids_of

KEY = AttemptKey(GroupId(1, 1), 1)


def choice(stops: tuple[str, ...] = ()) -> Choice:
    return Choice(0, 0, 5, ChoiceText(TOKENIZER.plan, [], stops=stops))


def accept(growing: Choice, text: str, finish: FinishReason | None = None) -> list[bool]:
    ids = ids_of(text)
    finishes = [None] * (len(ids) - 1) + [finish]
    return [
        growing.accept(Token(KEY, 0, growing.next_position, token_id, end))
        for token_id, end in zip(ids, finishes, strict=True)
    ]


def test_a_late_reader_gets_one_larger_piece() -> None:
    growing = choice()
    accept(growing, "one ")
    accept(growing, "two")
    piece = growing.take()
    assert piece is not None
    assert (piece.text, piece.finish) == ("one two", None)
    assert [token.token_id for token in piece.tokens] == ids_of("one ") + ids_of("two")
    assert growing.take() is None
    assert growing.next_position == 5 + len(growing.output_ids)


def test_the_finish_is_told_once() -> None:
    growing = choice()
    assert accept(growing, "end", FinishReason.LENGTH)[-1]
    piece = growing.take()
    assert piece is not None
    assert piece.finish is FinishReason.LENGTH
    assert not growing.has_news
    assert growing.take() is None


def test_a_stop_string_ends_it_without_a_word_from_the_worker() -> None:
    growing = choice(stops=("STOP",))
    ended = accept(growing, "go STOP")
    assert ended == [False] * (len(ended) - 1) + [True]
    assert growing.finish is FinishReason.STOP
    piece = growing.take()
    assert piece is not None
    assert piece.text == "go "


def test_a_stop_token_has_no_text() -> None:
    growing = choice()
    accept(growing, "fine")
    assert growing.accept(Token(KEY, 0, growing.next_position, ids_of("x")[0], FinishReason.STOP))
    piece = growing.take()
    assert piece is not None
    assert piece.text == "fine"
    assert growing.num_tokens == len(ids_of("fine")) + 1


def test_for_a_reader_that_wants_no_tokens_only_text_is_held() -> None:
    growing = Choice(0, 0, 5, ChoiceText(TOKENIZER.plan, []), keeps_tokens=False)
    text = "one two three " * 100
    accept(growing, text)
    assert growing.has_news
    held_bytes = growing.unread_bytes
    piece = growing.take()
    assert piece is not None
    assert (piece.text, piece.tokens) == (text, ())
    assert growing.num_tokens == len(ids_of(text))
    with_tokens = choice()
    accept(with_tokens, text)
    assert with_tokens.unread_bytes > 4 * held_bytes > 0


def test_nothing_is_unread_once_it_is_taken() -> None:
    growing = choice()
    accept(growing, "one")
    assert growing.unread_bytes > 0
    growing.take()
    assert growing.unread_bytes == 0
    assert not growing.has_news
