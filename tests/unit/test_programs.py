"""What a test says that needs a program which is not there."""

import pytest

from tests.programs import REQUIRE_ALL_ENV, require_program

MISSING = "no-such-program"


def test_a_program_that_is_there_is_found() -> None:
    assert require_program("sh", package="dash").endswith("/sh")


def test_without_it_the_test_is_reported_as_not_run_and_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUIRE_ALL_ENV, raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"not run: no-such-program is missing \(apt-get install nothing\)"):
        require_program(MISSING, package="nothing")


def test_where_all_tests_must_run_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRE_ALL_ENV, "1")
    with pytest.raises(pytest.fail.Exception, match="apt-get install nothing"):
        require_program(MISSING, package="nothing")
