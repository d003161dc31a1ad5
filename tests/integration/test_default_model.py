"""The default model: converted rightly, equal to `generate` in float32, and of use in bfloat16."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import PreTrainedTokenizerFast

from pdserve.engine.checkpoint import ensure_model
from pdserve.engine.model_runner import TorchModelRunner
from pdserve.model_folder import DEFAULT_MODEL, load_facts
from tests.steps import Oracle, generate

CHUNK = 48
POOL_BYTES = 256 << 20
# A cold start converts the model, which takes about half a minute.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_model(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return loaded


def _chat(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    message = {"role": "user", "content": text}
    return list(tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False))


def test_its_turns_end_with_im_end(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    assert load_facts(folder).eos_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert tokenizer.eos_token == "<|im_end|>"
    assert str(tokenizer.decode(_chat(tokenizer, "Hi"))).endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("text", ["Hello  world 123\n été  42", "\tx = 10 ** 2\n\n\n", "日本語 and 😀"])
def test_its_tokenizer_gives_text_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_numbers_are_split_into_digits(tokenizer: PreTrainedTokenizerFast) -> None:
    """With the space before them apart, as the model was trained: two spaces are one token here."""
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  123")) == ["a", "ĠĠ", "1", "2", "3"]


def test_its_weights_are_bfloat16(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118


def test_greedy_output_equals_generate_in_float32(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    text = tokenizer.encode("The history of bread is long. " * 12)
    random = np.random.default_rng(3)
    prompts = [text[:length] for length in (1, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK)]
    prompts += [random.integers(3, 49152, length).tolist() for length in (2, 16, 17, 33, 47, 49)]
    prompts += [_chat(tokenizer, "Name three colours."), _chat(tokenizer, "What is 12 + 30?")]
    oracle = Oracle(folder)
    expected = [oracle.continuation(prompt, 6) for prompt in prompts]
    runner = TorchModelRunner.within_memory(folder, "float32", "cpu", POOL_BYTES)
    assert len(prompts) == 16
    together = generate(runner, prompts, 6, CHUNK)
    assert [e.accepts(t) for e, t in zip(expected, together, strict=True)] == [True] * 16
    alone = [generate(runner, [prompt], 6, CHUNK)[0] for prompt in prompts[3:14:3]]
    assert [e.accepts(t) for e, t in zip(expected[3:14:3], alone, strict=True)] == [True] * 4


def test_bfloat16_knows_the_capital_of_france(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    runner = TorchModelRunner.within_memory(folder, "bfloat16", "cpu", POOL_BYTES)
    (answer,) = generate(runner, [_chat(tokenizer, "What is the capital of France?")], 8, 512)
    assert "Paris" in tokenizer.decode(answer)
