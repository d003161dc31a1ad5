"""Token ids to text, one id at a time.

A tokenizer's decoder is a chain of small steps over token strings. Here each step is a stage that takes fragments as
they come and gives back what no later token can change; what it must hold back is bounded by one character, one
pattern or one run of byte tokens, so the cost is linear in the tokens. Streamed text therefore equals the library's
`decode` of everything at once by construction, not by a window that happens to be long enough. (The library's own
`DecodeStream` does not: it raises on byte runs that turn out invalid, and has no way to give up what it holds.)
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tokenizers import Regex
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import Decoder, Metaspace, Replace, Strip, WordPiece
from tokenizers.decoders import Sequence as Chain

from services.frontend.stages import (
    ByteFallbackStage,
    ByteLevelStage,
    SpacedStage,
    Stage,
    TextReplaceStage,
    TextStripStage,
    TokenMap,
    WordEndStage,
    byte_level_bytes,
    fallback_byte,
)

CONTEXT_TOKENS = 8
# What transformers' clean_up_tokenization replaces, in its order.
_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


class DecodingPlan:
    """How one tokenizer turns tokens into text. Shared by all its sequences.

    Args:
        backend: the tokenizer.
        clean_up_spaces: apply transformers' clean_up_tokenization.
    Attributes:
        vocab_size: ids are below this.
    Raises:
        ValueError: the tokenizer's decoder is of a kind that is not known here; names it.
    """

    def __init__(self, backend: Backend, *, clean_up_spaces: bool = False) -> None:
        added = backend.get_added_tokens_decoder()
        vocabulary = {i: token for token, i in backend.get_vocab(with_added_tokens=False).items()}
        vocabulary |= {i: token.content for i, token in added.items()}
        self.vocab_size = max(vocabulary) + 1
        self._tokens = [vocabulary.get(i) for i in range(self.vocab_size)]
        self._special = {token.content for token in added.values() if token.special}
        self._factories = list(_factories(backend.decoder))
        if clean_up_spaces:
            self._factories += [_text_replace(pattern, content) for pattern, content in _CLEANUP]
        kinds = [type(stage) for stage in self.stages()]
        self.byte_level = ByteLevelStage in kinds
        self.byte_fallback = ByteFallbackStage in kinds

    def stages(self) -> list[Stage]:
        """Fresh stages for one sequence."""
        return [make() for make in self._factories]

    def token(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """The token's string; None if it has no text: unknown, or special and skipped."""
        token = self._tokens[token_id] if 0 <= token_id < self.vocab_size else None
        return None if skip_special_tokens and token in self._special else token

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text that has already begun; empty for an unknown id."""
        token = self.token(token_id, skip_special_tokens=False)
        if token is None:
            return b""
        if self.byte_level:
            return byte_level_bytes(token)
        byte = fallback_byte(token) if self.byte_fallback else None
        if byte is not None:
            return bytes((byte,))
        begun = len(self.decode(["x"]))
        return self.decode(["x", token])[begun:].encode()

    def decode(self, tokens: Iterable[str]) -> str:
        """The text of token strings, all at once."""
        stages = self.stages()
        return _run(stages, tokens) + _finish(stages)

    def is_whole(self, token: str) -> bool:
        """Whether a token neither begins nor ends inside a character or a run of byte tokens."""
        if self.byte_level:
            try:
                byte_level_bytes(token).decode()
            except UnicodeDecodeError:
                return False
        return not (self.byte_fallback and fallback_byte(token) is not None)


class Detokenizer:
    """The text of one sequence's output.

    The contract: all that `push` and `flush` return, joined, is decode(prompt + output) without the longest prefix
    that it shares with decode(prompt). For a prompt that ends with a whole character this is what decode(prompt +
    output) adds to decode(prompt): a leading space that the tokenizer drops only at the start of a text is kept, since
    output continues its prompt. A character that the prompt's last token left half done appears whole. Buffered answers
    are made of the same pieces as streamed ones.

    Args:
        plan: the tokenizer's.
        prompt_ids: the prompt. Only its end is looked at: back to a whole token, and at least CONTEXT_TOKENS.
        skip_special_tokens: special tokens have no text.
    """

    def __init__(self, plan: DecodingPlan, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._plan = plan
        self._skip = skip_special_tokens
        self._stages = plan.stages()
        context = self._context(prompt_ids)
        released = _run(self._stages, context)
        self._shared = plan.decode(context)[len(released) :]

    def push(self, token_id: int) -> str:
        """The text that is final now that this token has come, often empty."""
        token = self._plan.token(token_id, self._skip)
        return "" if token is None else self._beyond_prompt(_run(self._stages, [token]))

    def flush(self) -> str:
        """The text that was held back, at the end. No token may follow."""
        return self._beyond_prompt(_finish(self._stages))

    def _context(self, prompt_ids: Sequence[int]) -> list[str]:
        context: list[str] = []
        for token_id in reversed(prompt_ids):
            token = self._plan.token(token_id, self._skip)
            if token is None:
                continue
            context.append(token)
            if len(context) >= CONTEXT_TOKENS and self._plan.is_whole(token):
                break
        return context[::-1]

    def _beyond_prompt(self, text: str) -> str:
        if not self._shared:
            return text
        same = 0
        for mine, theirs in zip(text, self._shared, strict=False):
            if mine != theirs:
                break
            same += 1
        self._shared = self._shared[same:] if same == len(text) else ""
        return text[same:]


def _run(stages: Sequence[Stage], fragments: Iterable[str]) -> str:
    for stage in stages:
        fragments = [out for fragment in fragments for out in stage.push(fragment)]
    return "".join(fragments)


def _finish(stages: Sequence[Stage]) -> str:
    fragments: list[str] = []
    for stage in stages:
        fragments = [out for fragment in fragments for out in stage.push(fragment)] + [*stage.flush()]
    return "".join(fragments)


Factory = Callable[[], Stage]


def _factories(decoder: Decoder | None) -> Iterator[Factory]:
    if decoder is None:
        yield SpacedStage
        return
    spec = json.loads(decoder.__getstate__())
    fused = False
    token_maps: list[Decoder] = []
    for step in spec["decoders"] if spec["type"] == "Sequence" else [spec]:
        if not fused and (token_map := _token_map(step)) is not None:
            token_maps.append(token_map)
            continue
        if token_maps:
            yield _mapped(token_maps)
            token_maps = []
        if step["type"] == "Fuse":
            fused = True
        elif fused and step["type"] == "Replace" and "String" in step["pattern"]:
            yield _text_replace(step["pattern"]["String"], step["content"])
        elif fused and step["type"] == "Strip":
            yield _text_strip(step["content"], step["start"], step["stop"])
        elif not fused and step["type"] == "ByteLevel":
            fused = True
            yield ByteLevelStage
        elif not fused and step["type"] == "ByteFallback":
            yield ByteFallbackStage
        elif not fused and step["type"] == "BPEDecoder":
            yield _word_end(step["suffix"])
        else:
            raise ValueError(f"decoder {step['type']}{' after Fuse' if fused else ''} is not supported")
    if token_maps:
        yield _mapped(token_maps)


def _token_map(step: dict[str, Any]) -> Decoder | None:
    match step["type"]:
        case "Replace":
            pattern = step["pattern"]
            return Replace(pattern["String"] if "String" in pattern else Regex(pattern["Regex"]), step["content"])
        case "Strip":
            return Strip(step["content"], step["start"], step["stop"])
        case "Metaspace":
            return Metaspace(step["replacement"], step["prepend_scheme"], step["split"])
        case "WordPiece":
            return WordPiece(step["prefix"], step["cleanup"])
    return None


def _mapped(token_maps: list[Decoder]) -> Factory:
    chain = Chain(token_maps)
    later: dict[str, str] = {}
    return lambda: TokenMap(chain, later)


def _text_replace(pattern: str, content: str) -> Factory:
    return lambda: TextReplaceStage(pattern, content)


def _text_strip(content: str, start: int, stop: int) -> Factory:
    return lambda: TextStripStage(content, start, stop)


def _word_end(suffix: str) -> Factory:
    return lambda: WordEndStage(suffix)
