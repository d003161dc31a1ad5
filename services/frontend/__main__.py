"""`python -m services.frontend`: one frontend, until SIGTERM."""

import asyncio
import sys

from pdserve.config import Settings
from pdserve.runtime.process import run_process
from services.frontend.frontend import Frontend
from services.frontend.listener import raise_file_limit


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set."""
    raise_file_limit()
    frontend = await Frontend.load(settings.frontend, settings.session, settings.model)
    await frontend.start()
    try:
        await frontend.serve(stop)
    finally:
        await frontend.stop()


if __name__ == "__main__":
    sys.exit(run_process("frontend", main))
