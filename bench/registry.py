"""The rows that exist. Adding one: write a module in `bench.rows` and name it here."""

from bench.row import Row
from bench.rows import handoff, interference, kv_push, stalled_reader

ROWS: tuple[Row, ...] = (interference.ROW, handoff.ROW, kv_push.ROW, stalled_reader.ROW)
