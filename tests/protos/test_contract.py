"""The wire contract is documented where it is defined."""

import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from pagewire.protos import controller_pb2, inference_pb2, worker_pb2
from pagewire.protos.common_pb2 import callers
from protos.generate import FOLDER, SEEN_AS

# Field numbers in descriptor.proto: of the owners in a file, of the parts in an owner, and of the
# oneofs in a message.
MESSAGES, ENUMS, SERVICES, EXTENSIONS, PARTS, ONEOFS = 4, 5, 6, 7, 2, 8


def compile_with_comments(name: str, scratch: Path) -> FileDescriptorProto:
    from grpc_tools import protoc  # hosts that only run tests of GPUs need not have it

    out = scratch / "descriptors"
    own = Path(protoc.__file__).parent / "_proto"  # google/protobuf/*.proto
    arguments = [
        "",
        SEEN_AS,
        f"-I{own}",
        f"--descriptor_set_out={out}",
        "--include_source_info",
    ]
    assert protoc.main([*arguments, str(FOLDER / name)]) == 0
    return FileDescriptorSet.FromString(out.read_bytes()).file[0]


def names_by_path(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    """Return all messages, enums and services with their parts, by their path in the descriptor."""
    assert not any(each.nested_type or each.enum_type for each in file.message_type)
    groups = [
        (MESSAGES, [(each.name, each.field) for each in file.message_type]),
        (ENUMS, [(each.name, each.value) for each in file.enum_type]),
        (SERVICES, [(each.name, each.method) for each in file.service]),
    ]
    names: dict[tuple[int, ...], str] = {
        (EXTENSIONS, index): each.name for index, each in enumerate(file.extension)
    }
    for kind, owners in groups:
        for index, (owner, parts) in enumerate(owners):
            names[kind, index] = owner
            for number, part in enumerate(parts):
                names[kind, index, PARTS, number] = f"{owner}.{part.name}"
    return names | oneofs_by_path(file)


def oneofs_by_path(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    """Return the oneofs that somebody wrote; the compiler makes one of each optional field."""
    return {
        (MESSAGES, index, ONEOFS, number): f"{message.name}.{oneof.name}"
        for index, message in enumerate(file.message_type)
        for number, oneof in enumerate(message.oneof_decl)
        if any(
            field.HasField("oneof_index")
            and field.oneof_index == number
            and not field.proto3_optional
            for field in message.field
        )
    }


def optionals_by_path(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    return {
        (MESSAGES, index, PARTS, number): f"{message.name}.{field.name}"
        for index, message in enumerate(file.message_type)
        for number, field in enumerate(message.field)
        if field.proto3_optional
    }


def comments_by_path(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    locations = file.source_code_info.location
    return {tuple(each.path): each.leading_comments for each in locations if each.leading_comments}


NAMES = sorted(path.name for path in FOLDER.glob("*.proto"))


@pytest.mark.parametrize("name", NAMES)
def test_everything_in_the_contract_has_a_comment(name: str, tmp_path: Path) -> None:
    file = compile_with_comments(name, tmp_path)

    commented = comments_by_path(file)
    assert [what for path, what in names_by_path(file).items() if path not in commented] == []


@pytest.mark.parametrize("name", NAMES)
def test_what_may_be_unset_says_what_that_means(name: str, tmp_path: Path) -> None:
    file = compile_with_comments(name, tmp_path)

    comments = comments_by_path(file)
    may_be_unset = optionals_by_path(file) | oneofs_by_path(file)
    silent = [
        what
        for path, what in may_be_unset.items()
        if not re.search(r"\b(unset|empty|by default)\b", comments.get(path, ""), re.IGNORECASE)
    ]
    assert silent == []


@pytest.mark.parametrize(
    "file", [inference_pb2.DESCRIPTOR, worker_pb2.DESCRIPTOR, controller_pb2.DESCRIPTOR]
)
def test_every_method_names_who_may_call_it(file: FileDescriptor) -> None:
    methods = [each for service in file.services_by_name.values() for each in service.methods]
    nobody = [each.full_name for each in methods if not each.GetOptions().Extensions[callers]]

    assert methods
    assert nobody == []
