"""What `make serve` tells when pip cannot fetch packages, with a pip that plays its part."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WARNING = "WARNING: Retrying (Retry(total=4)) after connection broken"
FAILS = f"""
echo "{WARNING}" >&2
echo "{WARNING}" >&2
echo "WARNING: nothing to act on" >&2
echo "ERROR: No matching distribution found for torch" >&2
exit 1
"""
SUCCEEDS = """
echo "Collecting torch"
echo "WARNING: nothing to act on" >&2
"""


def make_serve(folder: Path, pip: str) -> subprocess.CompletedProcess[str]:
    """`make serve` in a copy, where these scripts are pip and what it has installed."""
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).touch()
    programs = folder / ".venv/bin"
    programs.mkdir(parents=True)
    for name, script in {"pip": pip, "pdserve": 'echo "serves $*"'}.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    # A make that runs these tests hands its own variables down.
    env = {
        name: value for name, value in os.environ.items() if name not in ("ARGS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    # A session of its own: what a pip does to its process group, as Ctrl-C does, ends there.
    return subprocess.run(
        ["make", "serve"], cwd=folder, env=env, capture_output=True, text=True, timeout=60, start_new_session=True
    )


def test_packages_that_cannot_be_fetched_end_in_a_line_that_says_what_to_check(tmp_path: Path) -> None:
    done = make_serve(tmp_path, FAILS)
    assert done.returncode == 2
    reached, error, advice, *_ = done.stderr.splitlines()
    assert reached == "pip does not reach its package index, and tries again"
    assert error == "ERROR: No matching distribution found for torch"
    assert advice.startswith("Packages could not be installed, as pip says above.")
    assert "check pip's index settings (.venv/bin/pip config list) and the network" in advice
    assert "serves" not in done.stdout


def test_an_installation_that_works_says_nothing_of_pips_warnings(tmp_path: Path) -> None:
    done = make_serve(tmp_path, SUCCEEDS)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "serves up"


def test_an_installation_that_a_signal_ends_is_told_as_that(tmp_path: Path) -> None:
    done = make_serve(tmp_path, "kill -TERM $$")
    assert done.returncode != 0
    assert "The installation was stopped; run make again." in done.stderr.splitlines()
    assert "Packages could not be installed" not in done.stderr


def test_ctrl_c_is_no_trouble_with_packages_although_pip_calls_it_an_error(tmp_path: Path) -> None:
    done = make_serve(tmp_path, "trap 'exit 1' INT\nkill -INT 0\nexit 1")
    assert done.returncode != 0
    assert "Packages could not be installed" not in done.stderr
