from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pdserve.config import Settings, load_settings
from pdserve.core.errors import StartupError


def load(toml: Path | None = None, *, environ: dict[str, str] | None = None, **overrides: Any) -> Settings:
    return load_settings(toml, environ or {}, overrides)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "pdserve.toml"
    path.write_text('[frontend]\nport = 8001\nhost = "0.0.0.0"\nwait_s = 3\n[engine]\nmax_running = 16\n')
    return path


def test_without_any_source_the_defaults_hold() -> None:
    assert load() == Settings()


def test_the_last_source_that_has_a_value_wins(toml: Path) -> None:
    environ = {"PDSERVE_FRONTEND__PORT": "8002", "PDSERVE_FRONTEND__HOST": "127.0.0.2"}
    settings = load(toml, environ=environ, frontend={"port": 8003})
    assert settings.frontend.port == 8003
    assert settings.frontend.host == "127.0.0.2"
    assert settings.frontend.wait_s == 3.0
    assert settings.engine.max_running == 16
    assert settings.session == Settings().session


def test_every_bad_value_is_listed_at_once(toml: Path) -> None:
    toml.write_text("[engine]\nmax_running = 0\n[frontend]\nport = 70000\n")
    environ = {"PDSERVE_SESSION__PULSE_S": "soon", "PDSERVE_LOG__LEVEL": "LOUD"}
    with pytest.raises(StartupError) as refusal:
        load(toml, environ=environ, worker={"drain_s": -1})
    for path in ("engine.max_running", "frontend.port", "session.pulse_s", "log.level", "worker.drain_s"):
        assert path in str(refusal.value)
    assert "got soon" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("forever", ["inf", "nan"])
def test_nothing_may_take_forever(forever: str) -> None:
    with pytest.raises(StartupError, match=r"frontend\.total_timeout_s"):
        load(environ={"PDSERVE_FRONTEND__TOTAL_TIMEOUT_S": forever})


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("PDSERVE_FRONTEND__PROT", "frontend.prot"),
        ("PDSERVE_FRONT__PORT", "front"),
        ("PDSERVE_PORT", "port"),
        ("PDSERVE_ENGINE__SCRIPTED__SPEED", "engine.scripted.speed"),
    ],
)
def test_an_unknown_name_in_the_environment_is_refused(name: str, path: str) -> None:
    with pytest.raises(StartupError, match=f"{path}: no such setting"):
        load(environ={name: "1"})


def test_settings_that_do_not_fit_together_say_so_and_no_more() -> None:
    with pytest.raises(
        StartupError, match=r"^bad settings: engine: max_running \(256\) must not be above step_tokens \(16\)"
    ):
        load(engine={"step_tokens": 16})


def test_an_unknown_name_in_the_file_is_refused(toml: Path) -> None:
    toml.write_text("[frontend]\nprot = 8001\n")
    with pytest.raises(StartupError, match=r"frontend\.prot"):
        load(toml)


def test_environment_of_others_is_left_alone() -> None:
    assert load(environ={"PORT": "x", "PDSERVE_CACHE_DIR": "/tmp", "PATH": "/bin"}) == Settings()


def test_a_section_given_as_a_value_is_refused() -> None:
    with pytest.raises(StartupError, match="frontend"):
        load(environ={"PDSERVE_FRONTEND": "8001"})


@pytest.mark.parametrize(
    "names", [("PDSERVE_FRONTEND", "PDSERVE_FRONTEND__PORT"), ("PDSERVE_LOG__LEVEL__X", "PDSERVE_LOG__LEVEL")]
)
def test_a_value_that_is_also_a_section_is_refused(names: tuple[str, str]) -> None:
    for environ in (dict.fromkeys(names, "1"), dict.fromkeys(reversed(names), "1")):
        with pytest.raises(StartupError):
            load(environ=environ)


def test_nested_sections_and_lists_come_from_the_environment() -> None:
    environ = {"PDSERVE_ENGINE__SCRIPTED__STEP_S": "0.5", "PDSERVE_FRONTEND__WORKERS": "a:1,b:2"}
    settings = load(environ=environ)
    assert settings.engine.scripted.step_s == 0.5
    assert settings.frontend.workers == ("a:1", "b:2")


def test_a_missing_file_and_a_file_that_is_not_toml_are_told(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot read settings from .*: No such file"):
        load(tmp_path / "missing.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[frontend\n")
    with pytest.raises(StartupError, match=r"broken\.toml is not TOML"):
        load(broken)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(StartupError, match=r"broken\.toml is not TOML"):
        load(broken)


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().frontend.port = 1  # type: ignore[misc]


def test_sources_do_not_leak_into_each_other() -> None:
    overrides = {"frontend": {"port": 8001}}
    load_settings(None, {"PDSERVE_FRONTEND__HOST": "127.0.0.2"}, overrides)
    assert overrides == {"frontend": {"port": 8001}}
