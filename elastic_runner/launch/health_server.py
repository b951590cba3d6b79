"""``/live``, ``/ready`` and ``/metrics`` over HTTP, for probes and Prometheus. In threads of its own, and few of them:
nothing that a client does, or leaves undone, holds up the agent.
"""

from __future__ import annotations

import logging
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from elastic_runner.errors import ConfigError
from elastic_runner.launch.health import Answer, Health
from elastic_runner.observability.metrics import CONTENT_TYPE, expose

log = logging.getLogger(__name__)

_REQUEST = 5.0
"""Seconds that a client may be silent."""
_AT_ONCE = 16
"""Clients at a time; more are turned away."""


class HealthServer:
    """Answers from now on until ``close``. ``port`` 0: one that the system chooses. Raises ConfigError."""

    def __init__(self, health: Health, host: str, port: int) -> None:
        try:
            self._server = _Server(health, host, port)
        except OSError as error:
            raise ConfigError(f"--health {host}:{port}: {error.strerror or error}") from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}"
        """Where it is, without the path."""
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 2 * _AT_ONCE

    def __init__(self, health: Health, host: str, port: int) -> None:
        self.health = health
        self._room = threading.BoundedSemaphore(_AT_ONCE)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer would look up this machine's name, which can take long

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a client of the health server", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST
    server: _Server

    def do_GET(self) -> None:
        """Answer."""
        health, path = self.server.health, self.path.partition("?")[0]
        if path == "/live":
            self._tell(health.live())
        elif path == "/ready":
            self._tell(health.ready())
        elif path == "/metrics":
            self._send(HTTPStatus.OK, expose(health.metrics()), CONTENT_TYPE)
        else:
            self._send(HTTPStatus.NOT_FOUND, b"there are /live, /ready and /metrics\n")

    def _tell(self, answer: Answer) -> None:
        status = HTTPStatus.OK if answer.yes else HTTPStatus.SERVICE_UNAVAILABLE
        self._send(status, f"{answer.why}\n".encode())

    def _send(self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A line per probe would drown the log."""
