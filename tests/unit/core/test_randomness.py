import subprocess
import sys
from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.randomness import uniform

# Numbers that a replay in a later version must draw again.
KNOWN = {
    (0, 0, 0, 0): 0.156742553465558,
    (1, 0, 0, 0): 0.33776134126730917,
    (42, 3, 1000, 1): 0.7147671497666059,
    (2**64 - 1, 127, 2**31, 2): 0.3282926572444125,
}


def test_known_values_stay() -> None:
    assert {arguments: uniform(*arguments) for arguments in KNOWN} == KNOWN


def test_another_process_draws_the_same() -> None:
    code = "from pdserve.core.randomness import uniform; print(repr(uniform(42, 3, 1000, 1)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) == uniform(42, 3, 1000, 1)


@given(
    seed=st.integers(-(2**70), 2**70),
    sibling=st.integers(0, 127),
    position=st.integers(0, 2**40),
    draw=st.integers(0, 100),
)
def test_a_number_depends_on_its_arguments_alone(seed: int, sibling: int, position: int, draw: int) -> None:
    number = uniform(seed, sibling, position, draw)
    uniform(seed + 1, sibling, position, draw)
    assert uniform(seed, sibling, position, draw) == number
    assert 0.0 <= number < 1.0


def test_the_seed_counts_modulo_two_to_the_64() -> None:
    assert uniform(-1, 0, 5) == uniform(2**64 - 1, 0, 5)
    assert uniform(2**64 + 7, 0, 5) == uniform(7, 0, 5)


def test_no_two_neighbours_draw_the_same() -> None:
    numbers = {uniform(*arguments) for arguments in product(range(6), repeat=4)}
    assert len(numbers) == 6**4


def test_numbers_are_spread_evenly() -> None:
    count, bins = 20_000, 20
    found = Counter(int(uniform(7, 0, position) * bins) for position in range(count))
    expected = count / bins
    chi_squared = sum((found[b] - expected) ** 2 / expected for b in range(bins))
    # 19 degrees of freedom: a fair source exceeds this once in 100,000 seeds, and the seed is fixed.
    assert chi_squared < 57
