"""Fields of request bodies that take more than one shape, each read into one."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from pdserve.core.errors import ErrorCode, InvalidRequest
from services.frontend.request import Prompt

MAX_STOPS = 4
MAX_PROMPTS = 2048
UNSUPPORTED = "is not supported by this server"
_ECHO_CHARACTERS = 200


class TextPart(TypedDict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(TypedDict):
    """A message as clients send it. Further keys are the chat template's to read."""

    role: Annotated[str, Field(min_length=1)]
    content: str | Annotated[list[TextPart], Field(min_length=1)]


def echo(value: object) -> str:
    """A client's value for an error message, at most 200 characters of it."""
    if value is None or isinstance(value, (str, bool, int, float)):
        shown = json.dumps(value[:_ECHO_CHARACTERS] if isinstance(value, str) else value, ensure_ascii=False)
        return shown[:_ECHO_CHARACTERS]
    return "a list" if isinstance(value, list) else "an object"


def parse_messages(value: object) -> tuple[dict[str, Any], ...]:
    """A conversation; every `content` becomes one string."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages", f"messages must be a list with at least one message, not {echo(value)}")
    return tuple(_parse_message(message, f"messages[{i}]") for i, message in enumerate(value))


def _parse_message(value: object, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(param, f"{param} must be an object, not {echo(value)}")
    role = value.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{param}.role", f"{param}.role must be a non-empty string, not {echo(role)}")
    if role in ("tool", "function"):
        raise InvalidRequest(f"{param}.role", f"{param}.role {role} {UNSUPPORTED}", ErrorCode.unsupported)
    for field in ("tool_calls", "function_call"):
        if value.get(field):
            raise InvalidRequest(f"{param}.{field}", f"{param}.{field} {UNSUPPORTED}", ErrorCode.unsupported)
    return value | {"content": _parse_content(value.get("content"), f"{param}.content")}


def _parse_content(value: object, param: str) -> str:
    """Text parts become one string, a line for each."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise InvalidRequest(param, f"{param} must be a string or a list of text parts, not {echo(value)}")
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str):
            raise InvalidRequest(f"{param}[{i}]", f'{param}[{i}] must be {{"type": "text", "text": …}}')
        if kind != "text":
            message = f"{param}[{i}].type {echo(kind)} {UNSUPPORTED}: only text is"
            raise InvalidRequest(f"{param}[{i}].type", message, ErrorCode.unsupported)
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{param}[{i}].text", f"{param}[{i}].text must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


def parse_prompt(value: object) -> tuple[Prompt, ...]:
    """One prompt or several, each a text or token ids."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if len(value) <= MAX_PROMPTS and all(isinstance(item, str) for item in value):
            return tuple(value)
        if len(value) <= MAX_PROMPTS and all(isinstance(item, list) for item in value):
            return tuple(_parse_ids(item, f"prompt[{i}]") for i, item in enumerate(value))
        if type(value[0]) is int:
            return (_parse_ids(value, "prompt"),)
    raise InvalidRequest(
        "prompt",
        f"prompt must be a string, a list of token ids, or a list of up to {MAX_PROMPTS} of either, not {echo(value)}",
    )


def _parse_ids(value: list[Any], param: str) -> tuple[int, ...]:
    # A bool is an int, but not of type int.
    if not value or set(map(type, value)) != {int} or min(value) < 0:
        raise InvalidRequest(param, f"{param} must be a non-empty list of token ids, integers from 0 on")
    return tuple(value)


def parse_stop(value: object) -> tuple[str, ...]:
    """Up to MAX_STOPS stop strings."""
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise InvalidRequest("stop", f"stop must be a string or up to {MAX_STOPS} strings, none empty")
    return tuple(stops)


def parse_logit_bias(value: object) -> dict[int, float]:
    """JSON has only strings for keys: token id → bias."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest("logit_bias", f"logit_bias must be an object, not {echo(value)}")
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise InvalidRequest("logit_bias", f"logit_bias keys must be token ids, not {echo(key)}")
        if type(bias) not in (int, float):
            raise InvalidRequest("logit_bias", f"logit_bias of {key} must be a number, not {echo(bias)}")
    return {int(key): float(bias) for key, bias in value.items()}
