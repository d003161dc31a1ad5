"""The tokenizer of a model folder."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from pdserve.core.errors import ErrorCode, InvalidRequest, PdserveError, StartupError
from services.frontend.tokenizer import Tokenizer, TokenizerPool
from tests.tiny_tokenizers import CORPUS, KINDS, byte_fallback_bpe, byte_level_bpe, save_model_folder, word_piece

MESSAGES = [{"role": "user", "content": "Where is 你?"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model_folder(byte_level_bpe(), tmp_path / "model")


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_loads_and_its_text_is_the_librarys(kind: str, tmp_path: Path) -> None:
    backend = KINDS[kind]()
    tokenizer = Tokenizer.load(save_model_folder(backend, tmp_path))
    for text in CORPUS:
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text).ids
        assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=True) == backend.decode(ids)


def test_spaces_are_cleaned_up_only_where_transformers_does(tmp_path: Path) -> None:
    def decoded(name: str) -> str:
        tokenizer = Tokenizer.load(save_model_folder(KINDS[name](), tmp_path / name, clean_up_tokenization_spaces=True))
        return tokenizer.decode(tokenizer.encode("it is . here"))

    assert decoded("unigram_metaspace") == "it is. here"
    assert decoded("byte_level_bpe") == "it is . here"


def test_messages_are_rendered_by_the_template(tokenizer: Tokenizer) -> None:
    ids = tokenizer.render_chat(MESSAGES)
    assert tokenizer.decode(ids) == "<|im_start|>user\nWhere is 你?<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] in tokenizer.special_ids
    without = tokenizer.render_chat(MESSAGES, add_generation_prompt=False)
    assert tokenizer.decode(without) == "<|im_start|>user\nWhere is 你?<|im_end|>\n"


def test_the_final_message_can_be_continued(tokenizer: Tokenizer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    ids = tokenizer.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.decode(ids).endswith("assistant\nIt is")


def test_template_arguments_reach_the_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ ' thinking' if thinking }}"
    tokenizer = Tokenizer.load(save_model_folder(byte_level_bpe(), tmp_path, chat_template=template))
    ids = tokenizer.render_chat(MESSAGES, chat_template_kwargs={"thinking": True})
    assert tokenizer.decode(ids) == "Where is 你? thinking"


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "add_generation_prompt", "messages"])
def test_template_arguments_cannot_replace_what_is_not_theirs(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        tokenizer.render_chat(MESSAGES, chat_template_kwargs={name: "{{ 1 }}"})
    assert caught.value.param == "chat_template_kwargs"


def test_what_the_template_refuses_is_the_clients_fault(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = Tokenizer.load(save_model_folder(byte_level_bpe(), tmp_path, chat_template=template))
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        tokenizer.render_chat(MESSAGES)
    assert caught.value.param == "messages"


def test_a_message_without_what_the_template_reads_is_the_clients_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.render_chat([{"role": "user", "content": {"no": "text"}}])
    assert caught.value.param == "messages"


def test_a_model_without_a_template_has_no_chat(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_model_folder(byte_level_bpe(), tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.render_chat(MESSAGES)
    assert (caught.value.code, caught.value.param) == (ErrorCode.unsupported, "messages")


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode("a\ud800")
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.render_chat([{"role": "user", "content": "\udc00"}])
    assert caught.value.param == "messages"


def test_end_ids_are_the_models_and_the_tokenizers(folder: Path) -> None:
    own = byte_level_bpe().token_to_id("<|im_end|>")
    assert Tokenizer.load(folder).eos_ids == {own}
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Tokenizer.load(folder).eos_ids == {own, 7}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    assert Tokenizer.load(folder).eos_ids == {own, 0, 5}


def test_ids_are_below_the_vocabularys_size(tokenizer: Tokenizer) -> None:
    assert max(byte_level_bpe().get_vocab().values()) == tokenizer.vocab_size - 1


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = word_piece().from_str(word_piece().to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer.load(save_model_folder(backend, tmp_path))
    assert tokenizer.encode("the quick brown fox") == word_piece().encode("the quick brown fox").ids


@pytest.mark.parametrize("text", ["", "The Bär 😀 fox", "e\u0301 안녕\u2028x"])
def test_offsets_say_where_each_tokens_text_begins(tokenizer: Tokenizer, text: str) -> None:
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    again, decoded = tokenizer.decode_with_offsets(ids)
    assert decoded == text
    for found in (offsets, again):
        assert len(found) == len(ids)
        assert found == sorted(found)
        for token_id, offset in zip(ids, found, strict=True):
            raw = tokenizer.token_bytes(token_id).decode(errors="replace")
            assert "\N{REPLACEMENT CHARACTER}" in raw or text[offset:].startswith(raw)


def test_tokens_for_logprobs(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀")
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "😀"
    assert tokenizer.token_string(tokenizer.encode(" a")[0])[0] == "Ġ"
    assert tokenizer.token_string(10**6) == ""


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_missing_file_stops_the_start_in_one_line(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(StartupError, match=name) as caught:
        Tokenizer.load(folder)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="nowhere"):
        Tokenizer.load(tmp_path / "nowhere")


def test_a_broken_file_stops_the_start_in_one_line(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{\n")
    with pytest.raises(StartupError) as caught:
        Tokenizer.load(folder)
    assert "\n" not in str(caught.value)


def test_a_decoder_that_cannot_be_streamed_stops_the_start(tmp_path: Path) -> None:
    state = json.loads(byte_fallback_bpe().to_str())
    state["decoder"] = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    backend = byte_fallback_bpe().from_str(json.dumps(state))
    with pytest.raises(StartupError, match="CTC"):
        Tokenizer.load(save_model_folder(backend, tmp_path))


@pytest.mark.asyncio
async def test_the_pool_works_off_the_event_loop(tokenizer: Tokenizer) -> None:
    pool = TokenizerPool(tokenizer)
    assert await pool.run(lambda t: t.encode("one")) == tokenizer.encode("one")
    assert await pool.run(lambda _: threading.current_thread()) is not threading.current_thread()
    with pytest.raises(InvalidRequest):
        await pool.run(lambda t: t.encode("\ud800"))
    pool.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("method", [Tokenizer.encode, Tokenizer.encode_with_offsets])
async def test_the_loop_goes_on_while_a_long_text_is_encoded(
    tokenizer: Tokenizer, method: Callable[[Tokenizer, str], object]
) -> None:
    pool = TokenizerPool(tokenizer)
    # Takes about a second.
    text = " ".join(CORPUS) * 1500
    encoding = asyncio.ensure_future(pool.run(lambda t: method(t, text)))
    ticks_s = [time.monotonic()]
    while not encoding.done():
        await asyncio.sleep(0.01)
        ticks_s.append(time.monotonic())
    assert await encoding
    longest_s = max(later_s - earlier_s for earlier_s, later_s in pairwise(ticks_s))
    assert longest_s < (ticks_s[-1] - ticks_s[0]) / 2
    pool.close()


@pytest.mark.asyncio
async def test_the_pools_queue_is_bounded(tokenizer: Tokenizer) -> None:
    pool = TokenizerPool(tokenizer, num_threads=1, max_waiting=1)
    gate = threading.Event()
    running = [asyncio.ensure_future(pool.run(lambda _: gate.wait(30))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(PdserveError) as caught:
        await pool.run(lambda t: t.encode("one"))
    assert (caught.value.code, caught.value.retry_after_s) == (ErrorCode.queue_full, 1.0)
    gate.set()
    assert await asyncio.gather(*running) == [True, True]
    assert await pool.run(lambda t: t.encode("one")) == tokenizer.encode("one")
    pool.close()


@pytest.mark.asyncio
async def test_cancelling_frees_a_place_in_the_queue(tokenizer: Tokenizer) -> None:
    pool = TokenizerPool(tokenizer, num_threads=1, max_waiting=1)
    gate = threading.Event()
    first, second = (asyncio.ensure_future(pool.run(lambda _: gate.wait(30))) for _ in range(2))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    third = asyncio.ensure_future(pool.run(lambda t: t.encode("one")))
    await asyncio.sleep(0)
    gate.set()
    assert await third == tokenizer.encode("one")
    assert await first
    pool.close()


def test_torch_is_never_imported(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "import services.frontend.schemas, services.frontend.text\n"
        "from services.frontend.tokenizer import Tokenizer\n"
        f"tokenizer = Tokenizer.load(Path({str(folder)!r}))\n"
        "ids = tokenizer.render_chat([{'role': 'user', 'content': 'hello'}])\n"
        "assert tokenizer.decode(ids)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_ids_outside_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([-1, tokenizer.vocab_size, 2**63]) == ""
