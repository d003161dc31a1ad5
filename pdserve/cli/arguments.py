"""What a word of the command line may be, where argparse's own types take too much. What is refused is wrong usage."""

import math
from argparse import ArgumentTypeError

import httpx


def server_url(text: str) -> str:
    """Of a server of the API."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ArgumentTypeError(f"{text!r} is not a URL ({error}): give http://HOST:PORT") from None
    if url.scheme not in ("http", "https") or not url.host or not _is_port(url.port or 1):
        raise ArgumentTypeError(f"{text!r} is not a server's URL: give http://HOST:PORT")
    return text


def host_port(text: str) -> str:
    """Of a process that speaks gRPC."""
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdecimal() and _is_port(int(port))):
        raise ArgumentTypeError(f"{text!r} is not an address: give HOST:PORT")
    return text


def finite(text: str) -> float:
    """JSON has no NaN, and nothing waits for ever."""
    try:
        number = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(number):
        raise ArgumentTypeError(f"{text!r} is not a finite number")
    return number


def unicode_text(text: str) -> str:
    """Bytes of the command line that were not UTF-8 stand in it as lone surrogates, which JSON cannot carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ArgumentTypeError("it is not text in UTF-8") from None
    return text


def prompt_text(text: str) -> str:
    """A question."""
    if not text.strip():
        raise ArgumentTypeError("it is empty")
    return unicode_text(text)


def header_text(text: str) -> str:
    """What a header of HTTP can carry."""
    if not (text.isascii() and text.isprintable()):
        raise ArgumentTypeError("it has characters that no HTTP header can carry")
    return text


def _is_port(number: int) -> bool:
    return 0 < number < 1 << 16
