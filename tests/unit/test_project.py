"""Rules about the tree itself."""

import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pdserve", "services")
VAGUE_NAMES = {"common", "helpers", "misc", "shared", "util", "utils"}


def module_names() -> Iterator[str]:
    """Every module of the project, by walking the tree and importing nothing."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)


# Every module in a child of its own, forked where heavy packages are loaded and nothing of ours is.
IMPORT_EACH_ALONE = """
import importlib, json, multiprocessing, os, sys, threading, traceback
import aiohttp, grpc, numba, ray, torch, transformers.modeling_utils

failures = {}
for module in sys.argv[1:]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(module)
            assert threading.active_count() == 1, f"started {threading.enumerate()}"
            assert not multiprocessing.active_children(), "started a process"
        except BaseException:
            os.write(writer, traceback.format_exc()[-4000:].encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as report:
        failures[module] = report.read()
    _, status = os.waitpid(child, 0)
    failures[module] = failures[module] or (f"ended with status {status}" if status else "")
print(json.dumps(failures))
"""


@pytest.fixture(scope="module")
def import_failures() -> dict[str, str]:
    """What went wrong when each module was imported alone; "" if nothing."""
    done = run_python(IMPORT_EACH_ALONE, *sorted(module_names()))
    assert done.returncode == 0, done.stderr
    failures: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return failures


@pytest.mark.parametrize("module", sorted(module_names()))
def test_a_module_imports_alone_and_starts_nothing(module: str, import_failures: dict[str, str]) -> None:
    assert import_failures[module] == ""


def test_the_frontend_reaches_neither_torch_nor_ray() -> None:
    modules = [name for name in module_names() if name.startswith("services.frontend")]
    done = run_python(f"import sys, {', '.join(modules)}\nprint(*{{'torch', 'ray'}} & set(sys.modules))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_imports_go_one_way() -> None:
    done = run_python("from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))")
    assert done.returncode == 0, done.stdout


def test_the_layers_name_every_package() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = next(c["layers"] for c in config["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    named = {name.strip() for layer in layers for name in re.split(r"[|:]", layer)}
    found = {f"pdserve.{m.name}" for m in pkgutil.iter_modules([str(ROOT / "pdserve")])}
    assert found <= named


def test_generated_code_is_what_the_protos_generate() -> None:
    done = subprocess.run([sys.executable, "protos/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_package_files_are_empty() -> None:
    filled = [str(f) for p in PACKAGES for f in (ROOT / p).rglob("__init__.py") if f.stat().st_size]
    assert filled == []


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {f.parent for p in PACKAGES for f in (ROOT / p).rglob("*.py")}
    assert [str(f) for f in sorted(folders) if not (f / "__init__.py").exists()] == []


def test_modules_are_named_for_what_they_hold() -> None:
    assert [name for name in module_names() if VAGUE_NAMES & set(name.split("."))] == []


def test_unit_tests_mirror_the_tree() -> None:
    """tests/unit/engine tests pdserve/engine, a folder in it one of its modules; services and bench keep their names."""
    unit = ROOT / "tests/unit"
    folders = {file.parent.relative_to(unit) for file in unit.rglob("test_*.py")}

    def is_there(folder: Path) -> bool:
        homes = (ROOT / "pdserve" / folder, ROOT / folder)
        return any(home.is_dir() or home.with_suffix(".py").is_file() for home in homes)

    assert [str(folder) for folder in sorted(folders) if not is_there(folder)] == []


def test_the_page_of_the_clients_shows_a_run_of_each_one_at_its_pinned_version() -> None:
    folder = ROOT / "docs/clients"
    page = (folder / "README.md").read_text(encoding="utf-8")
    pins = re.findall(r"^(\S+)==(\S+)$", (folder / "requirements.txt").read_text(encoding="utf-8"), re.MULTILINE)
    scripts = [file.stem.removeprefix("with_") for file in folder.glob("with_*.py")]
    assert pins
    assert [f"{name} {version}" for name, version in pins if f"{name} {version}" not in page] == []
    assert [client for client in scripts if f"\n    {client}\n" not in page] == []
