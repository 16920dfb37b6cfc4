"""Exit with 0 if a router takes requests, by the standard gRPC health check, else with 1."""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0
SERVICE = "pagewire.v1.InferenceService"


def main(address: str) -> int:
    """Ask the router at an address, host:port; return the exit code."""
    try:
        with grpc.insecure_channel(address) as channel:
            request = health_pb2.HealthCheckRequest(service=SERVICE)
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S).status
    except grpc.RpcError as error:
        sys.stderr.write(f"{address} does not answer: {error.code().name}\n")
        return 1
    sys.stdout.write(f"{health_pb2.HealthCheckResponse.ServingStatus.Name(status)}\n")
    return 0 if status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
