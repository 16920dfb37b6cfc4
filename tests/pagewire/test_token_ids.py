import pytest

from pagewire.protos.token_ids import largest_token_id, pack_token_ids, unpack_token_ids


@pytest.mark.parametrize("token_ids", [[], [0], [1, 2**31, 2**32 - 1]])
def test_token_ids_survive(token_ids: list[int]) -> None:
    assert unpack_token_ids(pack_token_ids(token_ids)) == token_ids


@pytest.mark.parametrize("token_ids", [[0], [2**32 - 1, 1], [0x01020304, 0x04030201]])
def test_the_largest_is_found_without_unpacking(token_ids: list[int]) -> None:
    assert largest_token_id(pack_token_ids(token_ids)) == max(token_ids)


def test_four_bytes_an_id_the_lowest_first() -> None:
    assert pack_token_ids([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])


def test_token_ids_that_are_cut_off_are_refused() -> None:
    with pytest.raises(ValueError, match="take 7 bytes"):
        unpack_token_ids(bytes(7))
