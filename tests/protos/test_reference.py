"""The page of the gRPC interface shows what the descriptors have."""

import pytest

from pagewire.protos import common_pb2, controller_pb2, inference_pb2, worker_pb2
from protos.reference import FILES, FOLDER, read_blocks, reference_page

MODULES = (common_pb2, controller_pb2, inference_pb2, worker_pb2)


def test_everything_that_is_declared_is_shown() -> None:
    shown = {
        (block.kind, block.name): [member.name for member in block.members]
        for name in FILES
        for block in read_blocks((FOLDER / name).read_text(encoding="utf-8"))
    }

    declared = {}
    for file in (module.DESCRIPTOR for module in MODULES):
        for name, message in file.message_types_by_name.items():
            assert not message.nested_types, name
            declared["message", name] = [each.name for each in message.fields]
        for name, enum in file.enum_types_by_name.items():
            declared["enum", name] = [each.name for each in enum.values]
        for name, service in file.services_by_name.items():
            declared["service", name] = [each.name for each in service.methods]
    assert shown == declared


def test_each_thing_has_its_comment() -> None:
    for name in FILES:
        for block in read_blocks((FOLDER / name).read_text(encoding="utf-8")):
            assert block.comment, block.name
            assert [each.name for each in block.members if not each.comment] == [], block.name


def test_a_method_names_its_callers() -> None:
    lines = reference_page().splitlines()

    (session,) = (line for line in lines if line.startswith("| `Session` |"))
    assert "stream [SessionRequest](#sessionrequest) → stream" in session
    assert "| router |" in session


def test_a_field_shows_its_limit_within_the_cluster() -> None:
    lines = reference_page().splitlines()

    (met,) = (line for line in lines if line.startswith("| `prefill_workers` |"))
    assert "repeated [WorkerRef](#workerref), at most 4,096 between processes" in met


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown form in a message: map<string, int32> a = 1;"):
        list(read_blocks("message M {\n  map<string, int32> a = 1;\n}\n"))
