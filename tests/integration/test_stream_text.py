"""Streamed text equals buffered text, byte for byte, whatever the script and wherever a stop string is cut (invariant 2).

Workers echo their prompts, so a prompt's tokens decide what the answer spells and where its tokens end.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from tests.http_cluster import HttpCluster, http_cluster
from tests.scripted_words import MODEL
from tests.tiny_tokenizers import KINDS, save_model_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = {"engine": {"num_blocks": 2048, "scripted": {"step_s": 0.0005, "echo": True}}}
TEXTS = {
    "ascii": "The quick brown fox isn't jumping:\n\tover  the dog!",
    "emoji": "a😀b👍🏽c🇫🇷d",
    "zwj": "👩\u200d👩\u200d👧\u200d👦 and 🏳️\u200d🌈",
    "cjk": "你好，世界。日本語の文章",
    "hangul": "안녕하세요 \u1112\u1161\u11ab\u1100\u1173\u11af",
    "arabic": "مرحبا بالعالم",
    "hebrew": "שָׁלוֹם עולם",
    "combining": "e\u0301o\u0308 a\u0328\u0301 नमस्ते",
    "line separators": "one\u2028two\u2029three\u0085four\r\nfive",
    "replacement": "a\ufffdb\ufffd\ufffdc",
}
# Bytes that are no UTF-8, by themselves and where a character was cut, as a byte-level model may say them.
LONE_BYTES = [b"x\xf0y", b"x\x80\x80y\xff", b"o\xe4\xbd z\xe4\xbd\xa0", b"a\xf0\x9f\x98b\xf0\x9f\x98\x80\xed\xa0\x80."]
CONVERSATION = [{"role": "user", "content": TEXTS["emoji"]}, {"role": "assistant", "content": TEXTS["combining"]}]
# Characters of a stop string before and behind a boundary.
CUTS = ((1, 1), (2, 3), (4, 1), (0, 2), (2, 0))
AT_ONCE = 32


@dataclass(frozen=True)
class Echo:
    """A cluster that repeats prompts, and the tokenizer that they are made with."""

    cluster: HttpCluster
    tokenizer: Tokenizer

    def whole_text(self, ids: Sequence[int]) -> str:
        """What an answer that repeats `ids` adds to a prompt of `ids`: everything decoded at once."""
        decode = self.tokenizer.decode
        return decode([*ids, *ids]).removeprefix(decode(ids))

    async def check(self, ids: Sequence[int], stop: str | None, *, include: bool = False) -> None:
        """Streamed and buffered, the text is everything up to the stop string."""
        wanted = cut(self.whole_text(ids), stop, include=include)
        fields = {"stop": stop, "include_stop_str_in_output": include} if stop else {}
        async with asyncio.timeout(60):
            buffered = await self.cluster.complete(ids, len(ids), **fields)
            stream = await self.cluster.streamed(ids, len(ids), **fields)
        assert buffered == wanted, (stop, ids)
        assert stream.is_done
        assert stream.text == wanted, (stop, ids)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["byte_level_bpe", "byte_fallback_bpe"])
async def echo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Echo]:
    folder = tmp_path_factory.mktemp("echo")
    tokenizer = KINDS[request.param]()
    model = save_echo_folder(tokenizer, folder / "model")
    async with http_cluster(folder, [ECHO], [ECHO], model_folder=model) as cluster:
        yield Echo(cluster, tokenizer)


def save_echo_folder(tokenizer: Tokenizer, folder: Path) -> Path:
    save_model_folder(tokenizer, folder)
    config = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    return folder


def cut(text: str, stop: str | None, *, include: bool) -> str:
    if stop is None or stop not in text:
        return text
    return text[: text.index(stop) + (len(stop) if include else 0)]


def stops_at_every_boundary(text: str, boundaries: Sequence[int]) -> list[str]:
    """Strings that some token boundary cuts, or only just does not."""
    stops = {text[max(0, at - before) : at + after] for at in boundaries for before, after in CUTS}
    return sorted(stops - {""})


async def check_all(echo: Echo, ids: Sequence[int]) -> None:
    text = echo.whole_text(ids)
    boundaries = [len(echo.tokenizer.decode(ids[:count])) for count in range(1, len(ids) + 1)]
    gate = asyncio.Semaphore(AT_ONCE)

    async def check(stop: str | None, include: bool) -> None:
        async with gate:
            await echo.check(ids, stop, include=include)

    stops = stops_at_every_boundary(text, boundaries)
    assert stops
    await asyncio.gather(check(None, False), *(check(stop, index % 3 == 0) for index, stop in enumerate(stops)))


@pytest.mark.parametrize("name", TEXTS)
async def test_streamed_text_equals_buffered_text_for_stops_cut_at_every_token_boundary(echo: Echo, name: str) -> None:
    ids = echo.tokenizer.encode(TEXTS[name]).ids
    assert len(ids) > 3
    if echo.tokenizer.decode(ids) == TEXTS[name]:
        assert echo.whole_text(ids).strip() == TEXTS[name].strip()
    await check_all(echo, ids)


@pytest.mark.parametrize("raw", LONE_BYTES, ids=repr)
async def test_lone_bytes_become_replacement_characters_in_the_same_places(echo: Echo, raw: bytes) -> None:
    ids = [byte_token(echo.tokenizer, byte) for byte in raw]
    assert "\ufffd" in echo.whole_text(ids)
    await check_all(echo, ids)


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    """The token of one byte: the letter that it is, or else whichever name the tokenizer has for it."""
    # GPT-2's alphabet: printable bytes of Latin-1 stand for themselves, the others, in order, are 256 and on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    letter = chr(byte) if byte in printable else chr(256 + others.index(byte))
    names = [chr(byte)] if chr(byte).isascii() else []
    found = [tokenizer.token_to_id(name) for name in (*names, f"<0x{byte:02X}>", letter)]
    return next(token_id for token_id in found if token_id is not None)


async def test_a_conversation_streams_as_it_is_buffered(echo: Echo) -> None:
    """With the template's special tokens in the answer, left out or kept."""
    for fields in ({}, {"skip_special_tokens": False}, {"stop": ["\u0301", "👍"]}):
        body = {"messages": CONVERSATION, "max_tokens": 150, "temperature": 0, "ignore_eos": True, **fields}
        status, buffered, _ = await echo.cluster.post(body, "/v1/chat/completions")
        assert status == 200, buffered
        text = buffered["choices"][0]["message"]["content"]
        assert await streamed_chat(echo.cluster, body) == text
        assert ("<|im_start|>" in text) == (fields == {"skip_special_tokens": False})


async def streamed_chat(cluster: HttpCluster, body: dict[str, object]) -> str:
    url = cluster.url + "/v1/chat/completions"
    async with cluster.http.post(url, json={"model": MODEL, "stream": True} | body) as response:
        lines = (await response.read()).split(b"\n")
    events = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    return "".join(delta.get("content", "") for delta in deltas)
