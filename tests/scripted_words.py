"""A model folder for scripted workers: every token of their answers is a word that names its id."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pdserve.core.sampling import SamplingParams
from pdserve.engine.scripted import DEFAULT_SCRIPT, scripted_answer
from tests.tiny_tokenizers import SPECIAL_TOKENS, save_model_folder

MODEL = "words"
CONTEXT_TOKENS = DEFAULT_SCRIPT.max_context_tokens
VOCAB_SIZE = DEFAULT_SCRIPT.first_token_id + DEFAULT_SCRIPT.num_token_ids


def save_words_folder(folder: Path) -> Path:
    """A tokenizer with a token for each byte, and ` w1928` for token 1928; the frontend needs no weights."""
    names = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"Ġw{token_id}" for token_id in range(len(names), VOCAB_SIZE)]
    tokenizer = Tokenizer(models.BPE({name: token_id for token_id, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    save_model_folder(tokenizer, folder)
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT_TOKENS, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    return folder


def words(token_ids: Iterable[int]) -> str:
    """The text of an answer's tokens."""
    return "".join(f" w{token_id}" for token_id in token_ids)


def right_answer(prompt_ids: Sequence[int], max_tokens: int) -> str:
    """What a greedy answer must say: computed without a pool, a wire or a batch."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return words(scripted_answer(np.asarray(prompt_ids, np.int32), params))
