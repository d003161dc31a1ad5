"""docs/conformance.md names tests that exist, and leaves no test of the contract out."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = TESTS.parent / "docs" / "conformance.md"
_NAME = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def _named() -> list[tuple[str, str]]:
    return _NAME.findall(TABLE.read_text(encoding="utf-8"))


def _functions(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def test_every_named_test_exists() -> None:
    existing = {(path.name, name) for path in TESTS.rglob("test_*.py") for name in _functions(path)}
    assert _named()
    assert [named for named in _named() if named not in existing] == []


def test_every_row_names_a_test() -> None:
    rows = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cases = [row for row in rows if not row.endswith("| test |")]
    assert [row for row in cases if not _NAME.search(row)] == []


def test_every_file_of_the_contract_is_named() -> None:
    named = {file for file, _ in _named()}
    files = {path.name for path in Path(__file__).parent.glob("test_*.py")} - {Path(__file__).name}
    assert files - named == set()
