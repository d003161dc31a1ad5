"""Logs: one line an event on stderr, JSON for machines or short text for people.

Besides the message a line carries the fields of FIELDS that the call passes by `extra={"request": …}`, and no others: no
prompt, answer or key gets into a log that way.
"""

import json
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

from pdserve.config import LogConfig

FIELDS = ("request", "sequence", "attempt", "worker", "frontend", "address", "admin", "blocks", "code", "reason")

_PROJECT_LOGGERS = ("pdserve", "services")


def configure_logs(component: str, config: LogConfig) -> None:
    """Send every log of this process to stderr; those of other packages from WARNING on.

    Args:
        component: the process: frontend, prefill, decode, controller.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(component) if config.json_lines else TextFormatter(component))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in _PROJECT_LOGGERS:
        logging.getLogger(name).setLevel(config.level)


class JsonFormatter(logging.Formatter):
    """One JSON object a line; ASCII, so that no character of a message can break it."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _timestamp(record),
            "level": record.levelname,
            "component": self._component,
            "logger": record.name,
            "message": record.getMessage(),
            **dict(_fields_of(record)),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class TextFormatter(logging.Formatter):
    """`12:30:00.125 WARNING frontend: message (worker=decode-0)`; a traceback follows on its own lines."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in _fields_of(record))
        line = f"{_timestamp(record)[11:23]} {record.levelname} {self._component}: {record.getMessage()}"
        if fields:
            line += f" ({fields})"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _fields_of(record: logging.LogRecord) -> Iterator[tuple[str, str]]:
    for name in FIELDS:
        value = getattr(record, name, None)
        if value is not None:
            yield name, str(value)


def _timestamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
