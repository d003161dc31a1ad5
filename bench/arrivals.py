"""When requests arrive."""

from random import Random


def poisson_times(rate_rps: float, count: int, seed: int) -> list[float]:
    """`count` arrival times in seconds from 0, growing, with exponential gaps of mean 1 / `rate_rps`.

    The same seed gives the same times on every machine, so two systems can be sent one trace.
    """
    if rate_rps <= 0:
        raise ValueError(f"rate_rps must be above 0, not {rate_rps}")
    random = Random(seed)
    times: list[float] = []
    now_s = 0.0
    for _ in range(count):
        now_s += random.expovariate(rate_rps)
        times.append(now_s)
    return times
