"""JSON of a request body, read strictly."""

import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from pdserve.core.errors import ErrorCode, InvalidRequest, PdserveError

MAX_DEPTH = 64
# The parser holds the interpreter's lock, and everything else waits: a body of millions of small values would stop the
# process for seconds. What is counted stands in texts as well, but a prompt with so much of it is beyond any context.
MAX_BRACKETS = 250_000
MAX_COMMAS = 4_000_000
INTEGERS = range(-(2**63), 2**64)
_PATH_CHARACTERS = 100


def parse_body(body: bytes) -> dict[str, Any]:
    """JSON, strictly: UTF-8, an object, finite numbers of 64 bits, real text, at most MAX_DEPTH levels,
    MAX_BRACKETS containers and MAX_COMMAS values.

    Raises:
        PdserveError: invalid_request; names the field where there is one.
    """
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        raise _invalid_body(f"the body holds more than {MAX_BRACKETS} opening brackets")
    if body.count(b",") > MAX_COMMAS:
        raise _invalid_body(f"the body holds more than {MAX_COMMAS} commas")
    try:
        value = json.loads(body.decode())
    except UnicodeDecodeError as error:
        raise _invalid_body(f"the body is not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise _invalid_body(f"the body is not valid JSON: {error.msg} at character {error.pos}") from error
    except ValueError as error:
        raise _invalid_body("a number in the body has too many digits") from error
    except RecursionError as error:
        raise _invalid_body(f"the body is nested deeper than {MAX_DEPTH} levels") from error
    if not isinstance(value, dict):
        raise _invalid_body("the body must be a JSON object")
    _check_values(value)
    return value


def field_path(steps: Iterable[int | str]) -> str:
    """`messages[0].role`, from the steps to it."""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return path.removeprefix(".")[:_PATH_CHARACTERS]


def _invalid_body(message: str) -> PdserveError:
    return PdserveError(ErrorCode.invalid_request, message)


class _Place(NamedTuple):
    """Where a value stands in the body; a step costs the same at any depth."""

    parent: "_Place | None"
    step: int | str
    depth: int

    def child(self, step: int | str) -> "_Place":
        return _Place(self, step, self.depth + 1)

    @property
    def path(self) -> str:
        steps: list[int | str] = []
        place = self
        while place.parent is not None:
            steps.append(place.step)
            place = place.parent
        return field_path(reversed(steps))


def _check_values(body: dict[str, Any]) -> None:
    """Every key, text and number of the body. Containers wait on a stack, so depth costs no recursion."""
    pending: list[tuple[_Place, dict[str, Any] | list[Any]]] = [(_Place(None, "", 0), body)]
    while pending:
        place, container = pending.pop()
        if place.depth >= MAX_DEPTH:
            raise InvalidRequest(place.path, f"{place.path} is nested deeper than {MAX_DEPTH} levels")
        if isinstance(container, dict):
            for key in container:
                _check_text(place, key)
        elif set(map(type, container)) == {int}:
            # A prompt of a million ids.
            _check_integer(place, max(container))
            _check_integer(place, min(container))
            continue
        for step, value in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(value, str):
                if not value.isascii():
                    _check_text(place.child(step), value)
            elif isinstance(value, float):
                if not math.isfinite(value):
                    path = place.child(step).path
                    raise InvalidRequest(path, f"{path} must be a finite number")
            elif isinstance(value, int):
                if value not in INTEGERS:
                    _check_integer(place.child(step), value)
            elif isinstance(value, (dict, list)):
                pending.append((place.child(step), value))


def _check_integer(place: _Place, value: int) -> None:
    if value not in INTEGERS:
        raise InvalidRequest(place.path, f"{place.path} holds an integer that does not fit 64 bits")


def _check_text(place: _Place, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        path = place.path
        message = f"{path or 'the body'} holds a lone surrogate, which is not text"
        raise PdserveError(ErrorCode.invalid_request, message, param=path or None) from error
