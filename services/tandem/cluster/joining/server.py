"""The port that machines join at: HTTPS, one token, two paths (protocol.py).

It serves a few short calls at a time, each within a deadline. A caller without the token gets only
the authority's certificate, which is no secret.
"""

import hmac
import json
import logging
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from socket import AF_INET6
from typing import Any

import msgspec

from tandem.bounded_connections import BoundedThreads
from tandem.cluster.joining.protocol import JoinReply, JoinRequest
from tandem.errors import ConfigError

log = logging.getLogger(__name__)

_BODY_BYTES_MAX = 10_000


class JoinServer(BoundedThreads, HTTPServer):
    """Serves from a thread of its own until `close`."""

    def __init__(
        self,
        address: str,
        port: int,
        *,
        folder: Path,
        token: str,
        reply: JoinReply,
        joined: Callable[[str], None],
    ) -> None:
        """`folder` has the certificate of this server. `joined` is called with the address of each
        machine that got the reply. Raises ConfigError if the port is taken."""
        self.token = token
        self.reply = reply
        self.joined = joined
        self.ca = (folder / "ca.crt").read_bytes()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        if ":" in address:
            self.address_family = AF_INET6
        try:
            super().__init__((address, port), _Call)
        except OSError as error:
            raise ConfigError(f"cannot listen on {address}:{port}: {error.strerror}") from error
        threading.Thread(target=self.serve_forever, name="join", daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Runs in a thread of the call, so a slow handshake delays no other call."""
        try:
            request.settimeout(self.deadline_s)
            wrapped = self._context.wrap_socket(request, server_side=True)
        except OSError:
            self.shutdown_request(request)
        else:
            super().process_request_thread(wrapped, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.info("a call of %s to join ended early", client_address[0], exc_info=True)


class _Call(BaseHTTPRequestHandler):
    server: JoinServer
    server_version = "tandem"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path == "/ca":
            self._answer(200, self.server.ca)
        else:
            self._refuse(404, "there is only /ca and /join")

    def do_POST(self) -> None:
        if self.path != "/join":
            self._refuse(404, "there is only /ca and /join")
            return
        given = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            log.warning("%s is refused: its token to join is wrong", self.client_address[0])
            self._refuse(401, "the token is wrong")
            return
        try:
            length = int(self.headers.get("Content-Length", ""))
            if not 0 <= length <= _BODY_BYTES_MAX:
                raise ValueError("its length is out of bounds")
            told = msgspec.json.decode(self.rfile.read(length), type=JoinRequest)
        except (ValueError, msgspec.DecodeError) as error:
            self._refuse(400, f"the call cannot be read: {error}")
            return
        if told.version != (own := version("tandem-llm")):
            self._refuse(409, f"this cluster runs Tandem {own}, and you {told.version[:40]!r}")
            return
        self._answer(200, msgspec.json.encode(self.server.reply))
        self.server.joined(told.address)

    def _refuse(self, status: int, why: str) -> None:
        self._answer(status, json.dumps({"error": why}).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
