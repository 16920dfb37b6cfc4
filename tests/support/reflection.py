"""Asks a server by reflection."""

import grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)


def services_of(address: str) -> list[str]:
    """Return the names of the services that the server at an address has."""
    with grpc.insecure_channel(address) as channel:
        return list(ProtoReflectionDescriptorDatabase(channel).get_services())
