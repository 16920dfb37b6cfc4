from protos.addresses import join_address


def test_only_hosts_with_colons_get_brackets() -> None:
    assert join_address("127.0.0.1", 50051) == "127.0.0.1:50051"
    assert join_address("localhost", "0") == "localhost:0"
    assert join_address("::1", 50051) == "[::1]:50051"
    assert join_address("fe80::1%eth0", 1) == "[fe80::1%eth0]:1"
