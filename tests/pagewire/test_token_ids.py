import pytest

from pagewire.protos.token_ids import pack_token_ids, token_array, unpack_token_ids


@pytest.mark.parametrize("token_ids", [[], [0], [1, 2**31, 2**32 - 1]])
def test_token_ids_survive(token_ids: list[int]) -> None:
    assert unpack_token_ids(pack_token_ids(token_ids)) == token_ids


def test_an_array_is_packed_as_a_list_is() -> None:
    token_ids = [1, 0x01020304, 2**32 - 1]
    assert pack_token_ids(token_array(pack_token_ids(token_ids))) == pack_token_ids(token_ids)


def test_four_bytes_an_id_the_lowest_first() -> None:
    assert pack_token_ids([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])


def test_token_ids_that_are_cut_off_are_refused() -> None:
    with pytest.raises(ValueError, match="take 7 bytes"):
        unpack_token_ids(bytes(7))
    with pytest.raises(ValueError, match="take 7 bytes"):
        token_array(bytes(7))
