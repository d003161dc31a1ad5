import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdserve.config import LogConfig
from pdserve.telemetry.logs import configure_logs

log = logging.getLogger("pdserve.something")


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """Gives what was logged since; loggers are as before when the test ends."""
    loggers = [logging.getLogger(name) for name in (None, "pdserve", "services")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    yield lambda: capsys.readouterr().err
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_an_event_is_a_json_line_with_its_fields(stderr: Callable[[], str]) -> None:
    configure_logs("decode", LogConfig())
    log.info("pushed %d frames", 3, extra={"request": "7-1", "attempt": 2, "worker": "prefill-0"})
    (line,) = lines_of(stderr())
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "INFO",
        "component": "decode",
        "logger": "pdserve.something",
        "message": "pushed 3 frames",
        "request": "7-1",
        "attempt": "2",
        "worker": "prefill-0",
    }


def test_other_fields_are_left_out(stderr: Callable[[], str]) -> None:
    configure_logs("frontend", LogConfig())
    log.warning("refused", extra={"prompt": "my secret", "api_key": "sk-1"})
    (line,) = lines_of(stderr())
    assert line["message"] == "refused"
    assert not {"prompt", "api_key"} & set(line)


def test_a_message_cannot_forge_a_line(stderr: Callable[[], str]) -> None:
    configure_logs("frontend", LogConfig())
    log.info("a\nb\u2028c\r")
    (line,) = stderr().split("\n")[:-1]
    assert json.loads(line)["message"] == "a\nb\u2028c\r"
    assert line.isascii()


def test_an_exception_keeps_its_traceback(stderr: Callable[[], str]) -> None:
    configure_logs("frontend", LogConfig())
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("it failed")
    (line,) = lines_of(stderr())
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: broken")


def test_text_lines_are_short(stderr: Callable[[], str]) -> None:
    configure_logs("decode", LogConfig(json_lines=False))
    log.warning("slow step", extra={"worker": "decode-0", "sequence": "7-1/1.0"})
    time, line = stderr().split(" ", 1)
    assert len(time) == len("12:30:00.125")
    assert line == "WARNING decode: slow step (sequence=7-1/1.0 worker=decode-0)\n"


def test_the_level_is_the_projects_alone(stderr: Callable[[], str]) -> None:
    configure_logs("decode", LogConfig(level="DEBUG"))
    log.debug("ours")
    logging.getLogger("services.decode").debug("ours too")
    logging.getLogger("grpc").info("theirs")
    logging.getLogger("grpc").warning("their warning")
    assert [line["message"] for line in lines_of(stderr())] == ["ours", "ours too", "their warning"]


def test_configuring_twice_writes_once(stderr: Callable[[], str]) -> None:
    configure_logs("decode", LogConfig())
    configure_logs("decode", LogConfig(level="WARNING"))
    log.info("not any more")
    log.warning("once")
    assert [line["message"] for line in lines_of(stderr())] == ["once"]
