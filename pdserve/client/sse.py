"""Server-sent events from bytes that arrive in pieces, as the HTML standard defines them ("event stream
interpretation")."""

import re

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"


class EventParser:
    """Bytes in, the data of whole events out. It does no I/O, and no split of the bytes changes what comes out.

    An event counts once the blank line after it has come: what the end of the stream leaves unfinished is dropped.
    Comments, and events without data, are no events. Event names, ids and retry times are read over.
    """

    def __init__(self) -> None:
        self._begun = False
        self._after_cr = False
        # The pieces of a line that has not ended; a long one is joined once.
        self._line: list[bytes] = []
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """The data of every event that this piece completes."""
        if not self._begun:
            piece = self._begin(piece)
        if not piece:
            return []
        if self._after_cr:
            # The second half of a CRLF whose first half has already ended its line.
            piece = piece.removeprefix(b"\n")
        self._after_cr = piece.endswith(b"\r")
        first, *others = _LINE_END.split(piece)
        self._line.append(first)
        events = []
        for other in others:
            data = self._take(b"".join(self._line))
            self._line = [other]
            if data is not None:
                events.append(data)
        return events

    def _begin(self, piece: bytes) -> bytes:
        """Hold the first bytes until they are a byte order mark or none. Returns: what follows it."""
        self._line.append(piece)
        start = b"".join(self._line)
        if len(start) < len(_BOM) and _BOM.startswith(start):
            return b""
        self._begun = True
        self._line = []
        return start.removeprefix(_BOM)

    def _take(self, line: bytes) -> str | None:
        """Returns: the data of the event that this line ends, if it ends one."""
        if not line:
            data, self._data = self._data, []
            return "\n".join(data) if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            # A line is whole, so no character is split here.
            self._data.append(value.removeprefix(b" ").decode("utf-8", "replace"))
        return None
