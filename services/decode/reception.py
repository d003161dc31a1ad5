"""One push as decode holds it: the decisions about it, made on the table's side, and waited for by its handler."""

import asyncio

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.engine.work import Granted


class Reception:
    """What has been decided about a push.

    Attributes:
        granted: resolves when its blocks are there.
        ended: resolves when nothing more may be received: with None after a commit, else with the reason.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.granted: asyncio.Future[Granted] = loop.create_future()
        self.ended: asyncio.Future[PdserveError | None] = loop.create_future()
        self.stopped = False

    @property
    def committed(self) -> bool:
        return self.ended.done() and self.ended.result() is None

    def grant(self, granted: Granted) -> None:
        self.granted.set_result(granted)

    def acknowledge(self) -> None:
        self.ended.set_result(None)

    def stop(self, error: PdserveError | None) -> None:
        """The attempt wants no more of it; the handler leaves, and says so when nothing writes any more."""
        self.stopped = True
        if not self.ended.done():
            self.ended.set_result(error or PdserveError(ErrorCode.cancelled, "the request was cancelled"))
