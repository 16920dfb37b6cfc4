"""A collector of traces, as far as a process that sends them can tell."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector(BaseHTTPRequestHandler):
    """Keeps what comes."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requests.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


@contextmanager
def collecting():
    """Yield a collector's endpoint, and what has come: (path, request)."""
    collector = HTTPServer(("127.0.0.1", 0), Collector)
    collector.requests = []
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{collector.server_port}/v1/traces", collector.requests
    finally:
        collector.shutdown()
        collector.server_close()
