"""What every test shares: options, hypothesis settings, and the watch over event loops."""

from collections.abc import Iterator

import pytest
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, settings

# An example may take long on a busy machine; only its outcome counts.
settings.register_profile("pdserve", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pdserve")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-s", type=float, default=60.0, help="how long each soak test runs, in seconds")


@pytest.fixture(scope="session")
def soak_s(request: pytest.FixtureRequest) -> float:
    """Seconds that a soak test runs."""
    return float(request.config.getoption("--soak-s"))


@pytest.fixture(autouse=True)
def nothing_blocks_the_loop() -> Iterator[None]:
    """A blocking call of ours on an event loop's thread raises BlockingError where it is made."""
    with blockbuster_ctx(["pdserve", "services"]):
        yield
