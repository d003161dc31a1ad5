"""The official Node SDK does its ordinary work here."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from pdserve.model_folder import cache_dir
from tests.contract.answering import answering
from tests.fake_worker import MODEL
from tests.frontend_stack import frontend_with, ids_of
from tests.programs import not_run, require_program

PACKAGE = "openai@7.59.0"
SCRIPT = Path(__file__).with_name("openai_node.mjs")
TEXT = "The quick brown 😀 fox"


@pytest.fixture(scope="module")
def sdk_folder() -> Path:
    """Where the SDK is installed; kept between runs."""
    for program, package in (("node", "nodejs"), ("npm", "npm")):
        require_program(program, package=package)
    folder = cache_dir() / "node" / PACKAGE
    if not (folder / "node_modules" / "openai").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true}')
        install = subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", PACKAGE],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if install.returncode != 0:
            not_run(f"npm could not install {PACKAGE}: {install.stderr.strip()[-200:]}")
    return folder


@pytest.mark.asyncio
async def test_the_node_sdk(sdk_folder: Path) -> None:
    async with frontend_with(*answering(ids_of(TEXT))) as stack:
        process = await asyncio.create_subprocess_exec(
            "node",
            str(SCRIPT),
            stack.url,
            MODEL,
            TEXT,
            cwd=sdk_folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
