"""The callers that the contract allows for each method; it closes methods that it does not name."""

from collections.abc import Mapping

from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from grpc_health.v1 import health_pb2

from credentials.cluster import CALLER_ROLES
from credentials.party import Role
from pagewire.protos import common_pb2, controller_pb2, worker_pb2

# Monitors call it, and it reveals nothing about requests.
HEALTH_SERVICE: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


def callers_in(file: FileDescriptor) -> dict[str, frozenset[Role]]:
    """Return the allowed callers of a file's methods: "/package.Service/Method" |-> roles."""
    return {
        f"/{service.full_name}/{method.name}": _callers(method)
        for service in file.services_by_name.values()
        for method in service.methods
    }


def _callers(method: MethodDescriptor) -> frozenset[Role]:
    # The generated types lack extensions.
    numbers: list[int] = method.GetOptions().Extensions[common_pb2.callers]  # type: ignore[index]
    return frozenset(CALLER_ROLES[number] for number in numbers if number in CALLER_ROLES)


def is_open(method: str) -> bool:
    """Return whether a method needs no proof."""
    return method.rpartition("/")[0].removeprefix("/") == HEALTH_SERVICE


CONTROLLER_CALLERS: Mapping[str, frozenset[Role]] = callers_in(controller_pb2.DESCRIPTOR)
WORKER_CALLERS: Mapping[str, frozenset[Role]] = callers_in(worker_pb2.DESCRIPTOR)
