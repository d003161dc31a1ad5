"""What can be typed, and what it means."""

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from pdserve.cli import main as entry
from pdserve.cli.commands import make_parser, run_command
from pdserve.cli.up import controller_notes, demo_note, overrides_of, settings_arguments, sharing_notes
from pdserve.config import load_settings


def parsed(*words: str) -> Any:
    return make_parser().parse_args(words)


def test_an_old_python_is_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2, "final", 0))
    assert entry.main() == 1
    error = capsys.readouterr().err
    assert error.startswith("pdserve: needs Python 3.11 or newer, and this is 3.9.2")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["dance"],
        ["up", "--port", "x"],
        ["up", "--bogus"],
        ["up", "--address", "nowhere"],
        ["scale", "decode"],
        ["status", "--controller", "nowhere"],
        ["status", "--controller", "127.0.0.1:x"],
        ["status", "--controller", "127.0.0.1:99999"],
        ["drain", "decode-0", "--deadline", "nan"],
        ["drain", "decode-0", "--deadline", "inf"],
        ["generate", "Hello", "--url", "127.0.0.1:8000"],
        ["generate", "Hello", "--url", "http://127.0.0.1:99999"],
        ["generate", "Hello", "--temperature", "nan"],
        ["generate", "Hello", "--api-key", "schlüssel"],
        ["generate", "not \udcff UTF-8"],
        ["generate", ""],
        ["generate", " \n"],
        ["probe", "--url", "ftp://127.0.0.1"],
        ["probe", "--via", "http://"],
    ],
)
def test_wrong_usage_is_one_line_and_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        make_parser().parse_args(words)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("pdserve")
    assert error.endswith(" --help\n")
    assert len(error.splitlines()) == 1


def test_a_command_refuses_what_it_does_not_know_with_its_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["up", "--modl", "x"])
    assert capsys.readouterr().err == "pdserve up: unrecognized arguments: --modl x; see pdserve up --help\n"


def test_generate_streams_unless_told() -> None:
    assert parsed("generate", "Hello").stream
    assert parsed("generate", "Hello", "--stream").stream
    assert not parsed("generate", "Hello", "--no-stream").stream


def test_options_of_up_are_settings() -> None:
    arguments = parsed(
        "up", "--port", "9000", "--prefill", "2", "--decode", "3", "--engine", "scripted", "--model", "/m/tiny"
    )
    assert overrides_of(arguments) == {
        "frontend": {"port": 9000},
        "cluster": {"prefill": 2, "decode": 3},
        "engine": {"kind": "scripted"},
        "model": {"path": "/m/tiny", "name": "tiny"},
    }
    assert overrides_of(parsed("up")) == {}


def test_colocated_needs_no_prefill_workers_unless_told() -> None:
    assert overrides_of(parsed("up", "--colocated"))["cluster"] == {"prefill": 0}
    assert overrides_of(parsed("up", "--colocated", "--prefill", "1"))["cluster"] == {"prefill": 1}


def test_its_processes_get_the_same_settings() -> None:
    arguments = parsed("up", "--decode", "2", "--set", "log.level=DEBUG", "--colocated")
    assert settings_arguments(arguments) == [
        *("--set", "log.level=DEBUG"),
        *("--set", "cluster.prefill=0"),
        *("--set", "cluster.decode=2"),
        *("--set", "worker.colocated=True"),
    ]


@pytest.mark.parametrize("words", [["scale", "decode", "-1"], ["drain", "decode-0", "--deadline", "0"]])
def test_a_value_that_cannot_be_is_refused_before_anybody_is_asked(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(words) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


# A command that has something to say.
TALKER = """
import sys
from pdserve.cli import commands

async def talk(arguments):
    print("word " * 100_000)
    return 0

commands.run_status = talk
sys.exit(commands.run_command(["status"]))
"""


def test_a_reader_that_has_gone_is_nothing_to_talk_about() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        done = subprocess.run([sys.executable, "-c", TALKER], stdout=output, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_output_that_finds_no_room_is_one_line() -> None:
    with open("/dev/full", "w") as output:
        done = subprocess.run([sys.executable, "-c", TALKER], stdout=output, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "pdserve: [Errno 28] No space left on device\n")


def test_bad_settings_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["up", "--set", "cluster.prefill=many"]) == 1
    assert capsys.readouterr().err.startswith("pdserve: bad settings: cluster.prefill")


def test_more_workers_than_a_cluster_has_places_for_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["up", "--decode", "1025"]) == 1
    assert capsys.readouterr().err.startswith(
        "pdserve: bad settings: cluster.decode: Input should be less than or equal"
    )


def test_more_workers_than_cores_is_said() -> None:
    settings = load_settings(environ={}, overrides={"cluster": {"prefill": 2, "decode": 2}})
    assert sharing_notes(settings, cores=4) == []
    assert sharing_notes(settings, cores=2) == [
        "4 workers share 2 cores: each engine has a core, some of them the same one"
    ]


@pytest.mark.parametrize(("kind", "note"), [("torch", ""), ("scripted", " (scripted: the words mean nothing)")])
def test_scripted_words_are_told_to_be_so(kind: str, note: str) -> None:
    assert demo_note(load_settings(environ={}, overrides={"engine": {"kind": kind}})) == note


def test_a_controller_where_commands_do_not_look_by_themselves_is_told() -> None:
    assert controller_notes(load_settings(environ={})) == []
    moved = load_settings(environ={}, overrides={"cluster": {"host": "::1", "port": 8200}})
    assert controller_notes(moved) == ["its workers: pdserve status --controller [::1]:8200"]
