"""Programs that are no Python packages, for tests which need them."""

import os
import shutil
from typing import NoReturn

import pytest

# Set where every test must run: what cannot run fails.
REQUIRE_ALL_ENV = "PDSERVE_REQUIRE_ALL"
_SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin"


def require_program(name: str, *, package: str) -> str:
    """The path of a program. Without it the test is reported as not run, with the Debian package that has it."""
    # Not every user's PATH has the folders of programs for administrators.
    path = shutil.which(name) or shutil.which(name, path=_SYSTEM_FOLDERS)
    if path is None:
        not_run(f"{name} is missing (apt-get install {package})")
    return path


def not_run(reason: str) -> NoReturn:
    """Report the test as not run, or as failed where every test must run."""
    if os.environ.get(REQUIRE_ALL_ENV):
        pytest.fail(f"not run: {reason}", pytrace=False)
    pytest.skip(f"not run: {reason}")
