"""Where the time goes between the server and its clients."""

from pdserve.cli.probe_samples import Run

NOTHING_FOUND = "found no failed streams, no buffering, no delay on the way"

# A stream whose first token comes so late in it was held back until it was whole.
_HELD_BACK_SHARE = 0.9
# Below this many events, a stream's shape says nothing.
_ENOUGH_EVENTS = 8
_GATHERED = 2.0
# A gap counts from here on; less is what any two measurements differ by.
_GAP_S = 0.005
_GAP_SHARE = 0.25


def find_gaps(direct: Run, via: Run | None) -> list[str]:
    """Sentences for a person, at least one."""
    found = _lost(direct) + (_lost(via) if via is not None else [])
    if via is not None:
        found += _between(direct, via)
    found += _beside_server(direct)
    return found or [NOTHING_FOUND]


def _lost(run: Run) -> list[str]:
    return [f"{count} of the streams through {run.url}: {why}" for why, count in run.seen.failures.items()]


def _between(direct: Run, via: Run) -> list[str]:
    here, there = via.seen, direct.seen
    found = []
    if _held_back(via) and not _held_back(direct):
        found += [
            f"{via.url} holds answers back until they are whole: their first token comes after "
            f"{here.ttft_share:.0%} of the total, and after {there.ttft_share:.0%} of it from {direct.url}. "
            "Turn response buffering and compression off on the way"
        ]
    elif here.events_per_read >= _GATHERED * there.events_per_read:
        found += [
            f"{via.url} gathers events: {here.events_per_read:.1f} come at once, {there.events_per_read:.1f} "
            f"from {direct.url}. Turn response buffering off on the way"
        ]
    elif _is_gap(here.itl.p99_s, there.itl.p99_s):
        found += [f"{via.url} adds {_ms(here.itl.p99_s - there.itl.p99_s)} to ITL p99"]
    if not _held_back(via) and _is_gap(here.ttft.p50_s, there.ttft.p50_s):
        found += [
            f"{via.url} adds {_ms(here.ttft.p50_s - there.ttft.p50_s)} to TTFT p50: connections, TLS, or a queue on the way"
        ]
    return found


def _beside_server(run: Run) -> list[str]:
    """What comes between the server's clock and the one here, with no proxy to blame."""
    found = []
    if _held_back(run):
        found += [f"answers from {run.url} come all at once: something holds them back until they are whole"]
    elif run.server_ttft is not None and _is_gap(run.seen.ttft.mean_s, run.server_ttft.mean_s):
        found += [
            f"{_ms(run.seen.ttft.mean_s - run.server_ttft.mean_s)} of the mean TTFT from {run.url} pass outside of "
            "the server: connections, the network, or this machine is busy"
        ]
    return found


def _held_back(run: Run) -> bool:
    seen = run.seen
    return seen.whole > 0 and seen.events >= _ENOUGH_EVENTS * seen.whole and seen.ttft_share >= _HELD_BACK_SHARE


def _is_gap(here_s: float, there_s: float) -> bool:
    return here_s - there_s > max(_GAP_S, _GAP_SHARE * there_s)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
