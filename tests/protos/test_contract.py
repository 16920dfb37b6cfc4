"""The wire contract is documented where it is defined."""

from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

import protos

FOLDER = Path(protos.__file__).parent
# Field numbers in descriptor.proto: of the owners in a file, and of the parts in an owner.
MESSAGES, ENUMS, SERVICES, PARTS = 4, 5, 6, 2


def compile_with_comments(name: str, scratch: Path) -> FileDescriptorProto:
    from grpc_tools import protoc  # hosts that only run tests of GPUs need not have it

    out = scratch / "descriptors"
    arguments = ["", f"-I{FOLDER.parent}", f"--descriptor_set_out={out}", "--include_source_info"]
    assert protoc.main([*arguments, f"protos/{name}"]) == 0
    return FileDescriptorSet.FromString(out.read_bytes()).file[0]


def names_by_path(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    """Return all messages, enums and services with their parts, by their path in the descriptor."""
    assert not any(each.nested_type or each.enum_type for each in file.message_type)
    groups = [
        (MESSAGES, [(each.name, each.field) for each in file.message_type]),
        (ENUMS, [(each.name, each.value) for each in file.enum_type]),
        (SERVICES, [(each.name, each.method) for each in file.service]),
    ]
    names: dict[tuple[int, ...], str] = {}
    for kind, owners in groups:
        for index, (owner, parts) in enumerate(owners):
            names[kind, index] = owner
            for number, part in enumerate(parts):
                names[kind, index, PARTS, number] = f"{owner}.{part.name}"
    return names


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.proto")))
def test_everything_in_the_contract_has_a_comment(name: str, tmp_path: Path) -> None:
    file = compile_with_comments(name, tmp_path)

    locations = file.source_code_info.location
    commented = {tuple(each.path) for each in locations if each.leading_comments}
    assert [what for path, what in names_by_path(file).items() if path not in commented] == []
