"""The steps that tokenizers' decoders are made of, each for fragments that come one at a time."""

import codecs
import re
from collections.abc import Iterable
from typing import Protocol

from tokenizers.decoders import Decoder

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REMEMBERED_FRAGMENTS = 2**19
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Stage(Protocol):
    """One step of a decoder for one sequence."""

    def push(self, fragment: str) -> Iterable[str]:
        """The fragments that are now final."""
        ...

    def flush(self) -> Iterable[str]:
        """What was held back, at the end."""
        ...


class TokenMap:
    """Steps that change each token by itself, except that the first token may differ (Metaspace, WordPiece, …)."""

    def __init__(self, chain: Decoder, later: dict[str, str]) -> None:
        self._chain = chain
        self._later = later
        self._first = True

    def push(self, fragment: str) -> Iterable[str]:
        if self._first:
            self._first = False
            return (self._chain.decode([fragment]),)
        mapped = self._later.get(fragment)
        if mapped is None:
            skip = len(self._chain.decode(["x"]))
            mapped = self._chain.decode(["x", fragment])[skip:]
            # Beyond the vocabulary's tokens come only runs of bytes, which need no memory.
            if len(self._later) < _REMEMBERED_FRAGMENTS:
                self._later[fragment] = mapped
        return (mapped,)

    def flush(self) -> Iterable[str]:
        return ()


class ByteLevelStage:
    """Characters that stand for bytes; a character split over tokens is held until it is whole or disproved."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, fragment: str) -> Iterable[str]:
        return (self._utf8.decode(byte_level_bytes(fragment)),)

    def flush(self) -> Iterable[str]:
        return (self._utf8.decode(b"", final=True),)


class ByteFallbackStage:
    """Runs of tokens like <0xE4>.

    A run becomes its text if all of it is UTF-8 and one U+FFFD a byte if not, so nothing of it is final before it ends.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, fragment: str) -> Iterable[str]:
        byte = fallback_byte(fragment)
        if byte is not None:
            self._run.append(byte)
            return ()
        return (*self.flush(), fragment)

    def flush(self) -> Iterable[str]:
        run, self._run = bytes(self._run), bytearray()
        if not run:
            return ()
        try:
            return (run.decode("utf-8"),)
        except UnicodeDecodeError:
            return (_REPLACEMENT,) * len(run)


class WordEndStage:
    """Tokens whose suffix marks the end of a word: a space, but for the last one."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._last: str | None = None

    def push(self, fragment: str) -> Iterable[str]:
        last, self._last = self._last, fragment
        return () if last is None else (last.replace(self._suffix, " "),)

    def flush(self) -> Iterable[str]:
        last, self._last = self._last, None
        return () if last is None else (last.replace(self._suffix, ""),)


class SpacedStage:
    """A tokenizer without a decoder: tokens joined by spaces."""

    def __init__(self) -> None:
        self._first = True

    def push(self, fragment: str) -> Iterable[str]:
        first, self._first = self._first, False
        return (fragment,) if first else (" " + fragment,)

    def flush(self) -> Iterable[str]:
        return ()


class TextReplaceStage:
    """`str.replace` over text that arrives in pieces; holds the longest suffix that begins the pattern."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content
        self._held = ""

    def push(self, fragment: str) -> Iterable[str]:
        *replaced, rest = (self._held + fragment).split(self._pattern)
        keep = min(len(rest), len(self._pattern) - 1)
        while not self._pattern.startswith(rest[len(rest) - keep :]):
            keep -= 1
        self._held = rest[len(rest) - keep :]
        return (self._content.join((*replaced, rest[: len(rest) - keep])),)

    def flush(self) -> Iterable[str]:
        held, self._held = self._held, ""
        return (held,)


class TextStripStage:
    """Drops up to `start` leading and `stop` trailing characters equal to `content`."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop
        self._held = ""

    def push(self, fragment: str) -> Iterable[str]:
        while self._start and fragment:
            if not fragment.startswith(self._content):
                self._start = 0
                break
            fragment = fragment[1:]
            self._start -= 1
        text = self._held + fragment
        trailing = len(text) - len(text.rstrip(self._content))
        cut = len(text) - min(trailing, self._stop)
        self._held = text[cut:]
        return (text[:cut],)

    def flush(self) -> Iterable[str]:
        return ()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token. One with a character that stands for no byte (an added token) is plain text."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()


def fallback_byte(token: str) -> int | None:
    """The byte of a token like <0xE4>, or None."""
    match = _FALLBACK.fullmatch(token) if token.startswith("<0x") else None
    return int(match[1], 16) if match else None


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()
