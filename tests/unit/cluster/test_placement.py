"""Places of workers, and their names."""

import pytest

from pdserve.cluster.placement import Slot
from pdserve.core.events import Role


@pytest.mark.parametrize("slot", [Slot(Role.PREFILL, 0), Slot(Role.DECODE, 12)])
def test_a_worker_id_names_its_slot(slot: Slot) -> None:
    assert Slot.parse(slot.worker_id) == slot


@pytest.mark.parametrize("name", ["", "decode", "decode-", "decode-x", "frontend-0", "decode-0 ", "controller-lock"])
def test_other_names_are_no_slots(name: str) -> None:
    assert Slot.parse(name) is None


def test_the_first_of_each_role_have_cores_of_their_own() -> None:
    indexes = [Slot(role, index).core_index for index in range(2) for role in Role]
    assert indexes == [0, 1, 2, 3]
