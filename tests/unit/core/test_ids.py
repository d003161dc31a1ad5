from pdserve.core.ids import AttemptKey, GroupId, GroupIdMint, random_id


def test_a_mint_never_repeats_a_group() -> None:
    mint = GroupIdMint(7)
    groups = [mint.mint() for _ in range(100)]
    assert len(set(groups)) == 100
    assert {group.instance for group in groups} == {7}


def test_random_ids_are_nonzero_and_fit_a_signed_64_bit_number() -> None:
    ids = {random_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(0 < i < 2**63 for i in ids)


def test_keys_are_written_with_all_their_parts() -> None:
    assert str(AttemptKey(GroupId(255, 4), 2)) == "00000000000000ff-4/2"
