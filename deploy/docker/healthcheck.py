"""Exit with 0 if a router or an HTTP gateway takes requests, else with 1.

python healthcheck.py localhost:50051 --authority-file /etc/pagewire-front-tls/ca.crt
python healthcheck.py http://localhost:8000/ready

A router is asked by the standard gRPC health check, a gateway by GET.
"""

import argparse
import ssl
import sys
import urllib.request
from http import HTTPStatus
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0
SERVICE = "pagewire.v1.InferenceService"


def main(words: list[str]) -> int:
    """Ask a router or a gateway; return the exit code."""
    asked = arguments(words)
    ask = _ask_gateway if asked.address.startswith(("http://", "https://")) else _ask_router
    try:
        return 0 if ask(asked) else 1
    except (OSError, grpc.RpcError) as error:
        reason = error.code().name if isinstance(error, grpc.RpcError) else error
        sys.stderr.write(f"{asked.address} does not answer: {reason}\n")
        return 1


def arguments(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Ask a server whether it takes requests.")
    parser.add_argument("address", help="A router's host:port, or a URL of a gateway.")
    parser.add_argument(
        "--service",
        default=SERVICE,
        help="Service to ask a router about; empty: the process alone.",
    )
    parser.add_argument(
        "--authority-file",
        type=Path,
        help="Authority of the server's certificate, in PEM; connects to a router over TLS.",
    )
    return parser.parse_args(words)


def _ask_router(asked: argparse.Namespace) -> bool:
    with _channel(asked.address, asked.authority_file) as channel:
        request = health_pb2.HealthCheckRequest(service=asked.service)
        status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S).status
    sys.stdout.write(f"{health_pb2.HealthCheckResponse.ServingStatus.Name(status)}\n")
    return bool(status == health_pb2.HealthCheckResponse.SERVING)


def _ask_gateway(asked: argparse.Namespace) -> bool:
    trust = ssl.create_default_context(cafile=asked.authority_file)
    no_proxy = urllib.request.ProxyHandler({})
    opener = urllib.request.build_opener(no_proxy, urllib.request.HTTPSHandler(context=trust))
    with opener.open(asked.address, timeout=TIMEOUT_S) as answer:
        return bool(answer.status == HTTPStatus.OK)


def _channel(address: str, authority_file: Path | None) -> grpc.Channel:
    if authority_file is None:
        return grpc.insecure_channel(address)
    credentials = grpc.ssl_channel_credentials(authority_file.read_bytes())
    return grpc.secure_channel(address, credentials)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
