"""Exit with 0 if a router takes requests, by the standard gRPC health check, else with 1.

python healthcheck.py localhost:50051 --authority-file /etc/pagewire-front-tls/ca.crt
"""

import argparse
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0
SERVICE = "pagewire.v1.InferenceService"


def main(words: list[str]) -> int:
    """Ask a router; return the exit code."""
    asked = arguments(words)
    try:
        with _channel(asked.address, asked.authority_file) as channel:
            request = health_pb2.HealthCheckRequest(service=asked.service)
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S).status
    except (OSError, grpc.RpcError) as error:
        reason = error.code().name if isinstance(error, grpc.RpcError) else error
        sys.stderr.write(f"{asked.address} does not answer: {reason}\n")
        return 1
    sys.stdout.write(f"{health_pb2.HealthCheckResponse.ServingStatus.Name(status)}\n")
    return 0 if status == health_pb2.HealthCheckResponse.SERVING else 1


def arguments(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Ask a router whether it takes requests.")
    parser.add_argument("address", help="Address of the router, host:port.")
    parser.add_argument(
        "--service", default=SERVICE, help="Service to ask about; empty: the process alone."
    )
    parser.add_argument(
        "--authority-file",
        type=Path,
        help="Authority of the router's certificate, in PEM; connects over TLS.",
    )
    return parser.parse_args(words)


def _channel(address: str, authority_file: Path | None) -> grpc.Channel:
    if authority_file is None:
        return grpc.insecure_channel(address)
    credentials = grpc.ssl_channel_credentials(authority_file.read_bytes())
    return grpc.secure_channel(address, credentials)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
