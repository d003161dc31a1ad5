"""Server-sent events, cut out of a byte stream with as little work as the format allows."""


class EventSplitter:
    """Turns reads of any size into the payloads of whole events.

    Comments and events without a data line are dropped. Line ends may be LF, CR or CRLF.
    """

    __slots__ = ("_held", "_tail")

    def __init__(self) -> None:
        self._tail = b""
        self._held = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The payloads that `chunk` completes, in order."""
        buffer = self._tail + self._held + chunk
        self._held = b""
        if b"\r" in buffer:
            if buffer.endswith(b"\r"):  # perhaps the first half of a CRLF
                buffer, self._held = buffer[:-1], b"\r"
            buffer = buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, self._tail = buffer.split(b"\n\n")
        payloads = (_payload(event) for event in events)
        return [payload for payload in payloads if payload is not None]

    @property
    def pending(self) -> bool:
        """Whether bytes of an unfinished event are held: at the end of a stream, it was cut inside one."""
        return bool(self._tail.strip(b"\n"))


def _payload(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
