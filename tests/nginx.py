"""A real nginx with the configuration as shipped, but for ports and what a test changes."""

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from pdserve.cli.machine import find_free_port
from tests.programs import require_program

CONFIG = Path(__file__).parents[1] / "deploy" / "nginx" / "pdserve.conf"
_START_S = 20.0
_MAIN = """
{user}
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/pdserve.conf;
}}
"""


def require_nginx() -> str:
    """The path of nginx; without it the test is reported as not run."""
    return require_program("nginx", package="nginx-light")


@asynccontextmanager
async def nginx(folder: Path, frontend_port: int, changes: Mapping[str, str]) -> AsyncIterator[str]:
    """nginx in front of a frontend; its URL.

    Args:
        folder: for its files; made here.
        changes: directives of the shipped configuration, each there once, and what stands in their place.
    """
    program, port = require_nginx(), find_free_port()
    folder.mkdir()
    (folder / "pdserve.conf").write_text(
        rendered(
            {"server 127.0.0.1:8000;": f"server 127.0.0.1:{frontend_port};", "listen 8080;": f"listen {port};"}
            | dict(changes)
        )
    )
    # As root it would otherwise work as a user who may not enter the folder.
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(_MAIN.format(user=user, folder=folder))
    process = subprocess.Popen(
        [program, "-p", str(folder), "-c", str(folder / "nginx.conf")], stderr=subprocess.DEVNULL
    )
    try:
        await _wait_listening(process, port, folder / "error.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def rendered(changes: Mapping[str, str]) -> str:
    """The shipped configuration with these changes."""
    text = CONFIG.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


async def _wait_listening(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until_s = time.monotonic() + _START_S
    while True:
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until_s, log.read_text()
        await asyncio.sleep(0.02)
