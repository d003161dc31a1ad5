"""The measured speed of prefill follows what the last steps show."""

import pytest

from pdserve.engine.prefill_speed import PrefillSpeed


def test_it_is_zero_until_something_was_measured() -> None:
    speed = PrefillSpeed()
    assert speed.tokens_per_s == 0.0
    speed.measure(0, 1.0)
    assert speed.tokens_per_s == 0.0


def test_steps_without_prompts_say_nothing() -> None:
    speed = PrefillSpeed()
    speed.measure(100, 0.5)
    speed.measure(0, 60.0)
    assert speed.tokens_per_s == pytest.approx(200.0)


def test_the_last_steps_count_most() -> None:
    speed = PrefillSpeed()
    for _ in range(50):
        speed.measure(100, 1.0)
    for _ in range(20):
        speed.measure(400, 1.0)
    assert speed.tokens_per_s == pytest.approx(400.0, rel=0.02)
