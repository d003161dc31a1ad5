import argparse

import pytest

from pdserve.core.errors import StartupError
from pdserve.runtime.process import add_settings_arguments, settings_from


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_settings_arguments(parser)
    return parser.parse_args([word for assignment in words for word in ("--set", assignment)])


def test_assignments_reach_nested_fields_and_lists_and_overrides_win() -> None:
    arguments = parse("engine.scripted.step_s=0.5", "frontend.workers=a:1,b:2", "frontend.port=8001")
    settings = settings_from(arguments, {"frontend": {"port": 8002}})
    assert settings.engine.scripted.step_s == 0.5
    assert settings.frontend.workers == ("a:1", "b:2")
    assert settings.frontend.port == 8002


@pytest.mark.parametrize("assignment", ["frontend.port", "frontend", "frontend=1", "=1", "frontend.=1"])
def test_what_is_no_assignment_is_refused(assignment: str) -> None:
    with pytest.raises(StartupError, match=r"--set takes SECTION\.FIELD=VALUE"):
        settings_from(parse(assignment))


def test_a_field_of_what_has_a_value_is_refused() -> None:
    with pytest.raises(StartupError, match=r"engine\.scripted\.step_s is a field of 'scripted', which has a value"):
        settings_from(parse("engine.scripted=1", "engine.scripted.step_s=1"))
