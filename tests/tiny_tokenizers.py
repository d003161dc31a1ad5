"""Small tokenizers of every kind, trained on a few lines of many scripts."""

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = (
    "The quick brown fox jumps over the lazy dog. It isn't fast, is it? Yes: they're here!",
    "def main(argv):\n    print('hello,  world')\n\treturn 0\n",
    "Der Bär läuft über die Straße; ça va déjà, señor? Où est l'été, s'il vous plaît…",
    "你好，世界。今天天气很好。日本語の文章もここにあります。カタカナ。",
    "안녕하세요 세계. 한국어 문장입니다. \u1112\u1161\u11ab\u1100\u1173\u11af",
    "مرحبا بالعالم שלום עולם Привет, мир! नमस्ते दुनिया สวัสดีชาวโลก",
    "😀 👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 👍🏽 🇫🇷 e\u0301 o\u0308 \ufffd a\ufffdb 1234567890",
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def byte_level_bpe() -> Tokenizer:
    """Like GPT-2's and SmolLM2's: characters split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("plain added"), AddedToken("été")])
    return tokenizer


@cache
def byte_fallback_bpe() -> Tokenizer:
    """Like Llama 2's and Mistral's: ▁ for spaces, one dropped at the start of a text, bytes for rare characters."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", *SPECIAL_TOKENS, *_BYTE_TOKENS], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS[:3], trainer)
    return _with_special(tokenizer, ("<unk>", *SPECIAL_TOKENS))


@cache
def unigram_metaspace() -> Tokenizer:
    """Like T5's and XLM-R's: Unigram with spaces merged into words."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("  ", " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIAL_TOKENS], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def word_piece() -> Tokenizer:
    """Like BERT's: ## for what continues a word, spaces cleaned up before punctuation."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["<unk>", *SPECIAL_TOKENS], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def word_end_bpe() -> Tokenizer:
    """Like GPT-1's: a suffix marks the end of a word."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", *SPECIAL_TOKENS], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def bare_words() -> Tokenizer:
    """No decoder at all: tokens joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", *SPECIAL_TOKENS], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS = {
    "byte_level_bpe": byte_level_bpe,
    "byte_fallback_bpe": byte_fallback_bpe,
    "unigram_metaspace": unigram_metaspace,
    "word_piece": word_piece,
    "word_end_bpe": word_end_bpe,
    "bare_words": bare_words,
}


def save_model_folder(
    tokenizer: Tokenizer, folder: Path, *, chat_template: str | None = CHAT_TEMPLATE, **config: object
) -> Path:
    """Write what a model folder has for its tokenizer. `config` adds to tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    settings |= {"clean_up_tokenization_spaces": False, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder


def _with_special(tokenizer: Tokenizer, special: tuple[str, ...]) -> Tokenizer:
    """The trainer makes the byte tokens special; only these should be."""
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in special]
    return Tokenizer.from_str(json.dumps(state))
