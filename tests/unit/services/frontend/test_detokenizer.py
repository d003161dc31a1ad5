"""Incremental detokenisation equals decoding everything at once, for every kind of tokenizer."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from services.frontend.detokenizer import CONTEXT_TOKENS, DecodingPlan, Detokenizer
from services.frontend.stages import byte_level_bytes
from tests.tiny_tokenizers import CORPUS, KINDS, byte_fallback_bpe, byte_level_bpe, unigram_metaspace, word_piece

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
kinds = pytest.mark.parametrize("kind", KINDS)


def stream(plan: DecodingPlan, ids: Sequence[int], prompt: Sequence[int] = (), skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(plan, prompt, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def decode_all(backend: Backend, ids: Sequence[int], prompt: Sequence[int] = (), skip: bool = True) -> str:
    """The oracle: decode prompt and output, leave out what they share with the prompt alone."""
    prompt_text = backend.decode(list(prompt), skip_special_tokens=skip)
    text = backend.decode([*prompt, *ids], skip_special_tokens=skip)
    shared = 0
    while shared < len(prompt_text) and text[shared : shared + 1] == prompt_text[shared]:
        shared += 1
    return text[shared:]


def id_of(backend: Backend, token: str) -> int:
    token_id = backend.token_to_id(token)
    assert token_id is not None
    return int(token_id)


def utf8_tokens(backend: Backend, data: bytes) -> list[int]:
    """Byte-fallback tokens of raw bytes."""
    return [id_of(backend, f"<0x{byte:02X}>") for byte in data]


@kinds
@pytest.mark.parametrize("text", CORPUS)
def test_text_streams_as_it_decodes(kind: str, text: str) -> None:
    backend = KINDS[kind]()
    ids = backend.encode(text).ids
    assert "".join(stream(DecodingPlan(backend), ids)) == backend.decode(ids)


@kinds
def test_any_ids_after_any_prompt_stream_as_they_decode(kind: str) -> None:
    backend = KINDS[kind]()
    plan = DecodingPlan(backend)
    # Two ids beyond the vocabulary, and the first ids often: there are the special and the byte tokens.
    ids = st.lists(st.integers(0, backend.get_vocab_size() + 1) | st.integers(0, 260), max_size=24)

    @settings(max_examples=100, derandomize=True, database=None)
    @given(prompt=ids, output=ids, skip=st.booleans())
    def check(prompt: list[int], output: list[int], skip: bool) -> None:
        assert "".join(stream(plan, output, prompt, skip)) == decode_all(backend, output, prompt, skip)

    check()


@kinds
def test_any_text_split_anywhere_streams_as_it_decodes(kind: str) -> None:
    backend = KINDS[kind]()
    plan = DecodingPlan(backend)

    @settings(max_examples=50, derandomize=True, database=None)
    @given(text=st.text(max_size=40) | st.sampled_from(CORPUS), data=st.data())
    def check(text: str, data: st.DataObject) -> None:
        ids = backend.encode(text).ids
        cut = data.draw(st.integers(0, len(ids)))
        assert "".join(stream(plan, ids[cut:], ids[:cut])) == decode_all(backend, ids[cut:], ids[:cut])

    check()


@settings(max_examples=150, derandomize=True)
@given(st.lists(st.binary(max_size=6), max_size=8))
def test_any_bytes_stream_as_they_decode(runs: list[bytes]) -> None:
    backend = byte_fallback_bpe()
    word = id_of(backend, "▁")
    ids = [token_id for data in runs for token_id in (*utf8_tokens(backend, data), word)]
    assert "".join(stream(DecodingPlan(backend), ids)) == backend.decode(ids)


@pytest.mark.parametrize(
    "name", ["emoji", "family", "flag", "han", "hangul", "jamo", "combining", "replacement", "arabic"]
)
def test_characters_split_over_tokens_come_out_whole(name: str) -> None:
    text = {
        "emoji": "a😀b",
        "family": "👩\u200d👩\u200d👧\u200d👦",
        "flag": "🇫🇷🏳️\u200d🌈",
        "han": "鬱龘",
        "hangul": "쀍뛟",
        "jamo": "\u1112\u1161\u11ab",
        "combining": "e\u0301o\u0308\u0323",
        "replacement": f"a{REPLACEMENT}b{REPLACEMENT}",
        "arabic": "مرحبا",
    }[name]
    backend = byte_level_bpe()
    # One token a byte, so every character is split everywhere.
    characters = {value: key for key, value in _byte_characters().items()}
    ids = [id_of(backend, characters[byte]) for byte in text.encode()]
    pieces = stream(DecodingPlan(backend), ids)
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)
    # Each character leaves with its last byte.
    assert [len(piece) for piece in pieces if piece] == [1] * len(text)


def _byte_characters() -> dict[str, int]:
    alphabet = (chr(code) for code in range(0x21, 0x144))
    return {c: byte_level_bytes(c)[0] for c in alphabet if len(byte_level_bytes(c)) == 1}


def test_a_half_character_at_the_end_is_flushed_as_a_replacement() -> None:
    backend = byte_level_bpe()
    ids = backend.encode("a😀").ids[:-1]
    pieces = stream(DecodingPlan(backend), ids)
    assert pieces[-1] == REPLACEMENT
    assert "".join(pieces) == backend.decode(ids)


def test_a_run_of_byte_tokens_that_turns_out_invalid_is_invalid_from_its_beginning() -> None:
    backend = byte_fallback_bpe()
    ids = [*utf8_tokens(backend, "你".encode()), *utf8_tokens(backend, b"\xff"), id_of(backend, "a")]
    assert "".join(stream(DecodingPlan(backend), ids)) == REPLACEMENT * 4 + "a" == backend.decode(ids)


@pytest.mark.parametrize("make", [byte_fallback_bpe, unigram_metaspace])
def test_output_keeps_the_space_that_only_a_text_begins_without(make: Callable[[], Backend]) -> None:
    backend = make()
    word = next(i for t, i in sorted(backend.get_vocab().items()) if t.startswith("▁") and len(t) > 1)
    plan = DecodingPlan(backend)
    assert not "".join(stream(plan, [word])).startswith(" ")
    assert "".join(stream(plan, [word], prompt=[word])).startswith(" ")


def test_a_character_that_the_prompt_left_half_done_appears_whole() -> None:
    backend = byte_level_bpe()
    ids = backend.encode("😀").ids
    assert len(ids) > 1
    assert "".join(stream(DecodingPlan(backend), ids[-1:], prompt=ids[:-1])) == "😀"


def test_a_long_prompt_costs_only_its_end() -> None:
    class Prompt(list[int]):
        reads = 0

        def __reversed__(self) -> Iterator[int]:
            for token_id in super().__reversed__():
                self.reads += 1
                yield token_id

    backend = byte_level_bpe()
    prompt = Prompt(backend.encode("word " * 1000).ids)
    Detokenizer(DecodingPlan(backend), prompt)
    assert prompt.reads == CONTEXT_TOKENS


def test_special_tokens_have_text_only_if_they_are_not_skipped() -> None:
    backend = byte_level_bpe()
    ids = [*backend.encode("one").ids, id_of(backend, "<|im_end|>"), *backend.encode(" two").ids]
    plan = DecodingPlan(backend)
    assert "".join(stream(plan, ids, skip=True)) == "one two"
    assert "".join(stream(plan, ids, skip=False)) == "one<|im_end|> two"


def test_clean_up_of_spaces_streams_as_transformers_decodes() -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=word_piece(), clean_up_tokenization_spaces=True)
    backend = fast.backend_tokenizer
    # Without its own clean-up, so that only transformers' is seen.
    backend.decoder = decoders.WordPiece(cleanup=False)
    plan = DecodingPlan(backend, clean_up_spaces=True)
    pieces = [" .", ".", " '", " ", "'", "n't", "s", " don", "!", "?", ","]
    vocabulary = [
        i for t, i in backend.get_vocab().items() if t.lstrip("#") in {p.strip() for p in pieces} or len(t) < 3
    ]

    @settings(max_examples=100, derandomize=True, database=None)
    @given(st.lists(st.sampled_from(sorted(vocabulary)), max_size=24))
    def check(ids: list[int]) -> None:
        assert "".join(stream(plan, ids)) == fast.decode(ids, skip_special_tokens=True)

    check()


@pytest.mark.parametrize(
    "chain",
    [
        decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "-"), decoders.Strip("b", 2, 3)]),
        decoders.Sequence([decoders.Replace(Regex("▁|a+"), " "), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Replace("aba", "x")]),
    ],
    ids=str,
)
def test_every_decoder_step_streams_as_the_library_runs_it(chain: decoders.Decoder) -> None:
    """Steps and orders that the trained tokenizers do not have."""
    backend = Backend.from_str(byte_fallback_bpe().to_str())
    backend.decoder = chain
    plan = DecodingPlan(backend)
    bytes_of_han = [f"<0x{byte:02X}>" for byte in "你".encode()]
    ids = [i for t, i in sorted(backend.get_vocab().items()) if set(t) <= set("ab▁") or t in bytes_of_han]
    plain = id_of(backend, "c")

    @settings(max_examples=100, derandomize=True, database=None)
    @given(st.lists(st.sampled_from(ids), max_size=16))
    def check(drawn: list[int]) -> None:
        # The library's Strip fails where what it strips from both ends overlaps.
        whole = [plain, *drawn, plain] if "Strip" in str(chain) else drawn
        assert "".join(stream(plan, whole)) == backend.decode(whole)

    check()


def test_a_decoder_that_cannot_be_streamed_is_refused_by_name() -> None:
    backend = Backend.from_str(byte_fallback_bpe().to_str())
    backend.decoder = decoders.CTC()
    with pytest.raises(ValueError, match="CTC"):
        DecodingPlan(backend)


def test_token_bytes_are_what_a_token_adds_to_a_text() -> None:
    level, fallback = byte_level_bpe(), byte_fallback_bpe()
    ids = level.encode("a 😀 für").ids
    plan = DecodingPlan(level)
    assert b"".join(map(plan.token_bytes, ids)).decode() == "a 😀 für"
    plan = DecodingPlan(fallback)
    assert plan.token_bytes(id_of(fallback, "<0xE4>")) == b"\xe4"
    assert plan.token_bytes(id_of(fallback, "▁")) == b" "
    assert plan.token_bytes(10**6) == b""


def test_text_never_waits_for_more_than_the_rest_of_its_character() -> None:
    backend = byte_level_bpe()
    pieces = stream(DecodingPlan(backend), backend.encode("你好 😀 " * 500).ids)
    ends = [i for i, piece in enumerate(pieces) if piece]
    assert max(later - earlier for earlier, later in pairwise(ends)) <= 4
