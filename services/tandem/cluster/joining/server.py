"""The HTTPS server that lets machines join (protocol.py).

A caller without the token gets only the authority's certificate, which is not secret.
"""

import hmac
import json
import logging
import ssl
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from tandem.cluster.joining.protocol import JoinReply, JoinRequest
from tandem.errors import ConfigError
from tandem.net.bounded_server import BoundedServer

log = logging.getLogger(__name__)


class JoinServer:
    """Answers join requests until `close`, in threads of its own."""

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
        """Starts to serve. `folder` contains ca.crt, tls.crt and tls.key. `joined` is called with
        the address of each machine that receives `reply`. Raises ConfigError if the port is taken.
        """
        self._token = token
        self._reply = reply
        self._joined = joined
        self._ca = (folder / "ca.crt").read_bytes()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        try:
            self._server = BoundedServer(self._app, address, port, name="join", context=context)
        except OSError as error:
            raise ConfigError(f"cannot listen on {address}:{port}: {error.strerror}") from error
        self.port = self._server.port

    def close(self) -> None:
        self._server.close()

    def _app(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        match environ["REQUEST_METHOD"], environ["PATH_INFO"]:
            case "GET", "/ca":
                status = "200 OK"
                body = self._ca
            case "POST", "/join":
                status, body = self._join(environ)
            case _:
                status, body = _refusal("404 Not Found", "this port serves only /ca and /join")
        start_response(status, [("Content-Type", "application/octet-stream")])
        return [body]

    def _join(self, environ: dict[str, Any]) -> tuple[str, bytes]:
        given = environ.get("HTTP_AUTHORIZATION", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            log.warning(
                "the host %s was not let into the cluster, because it sent a wrong join token",
                environ["REMOTE_ADDR"],
            )
            return _refusal("401 Unauthorized", "the join token is wrong")
        try:
            sent = msgspec.json.decode(environ["wsgi.input"].read(), type=JoinRequest)
        except (ValueError, msgspec.DecodeError) as error:
            return _refusal("400 Bad Request", f"the join request cannot be read: {error}")
        if sent.version != (own := version("tandem-llm")):
            why = (
                f"this cluster runs Tandem {own}, but the joining host runs "
                f"{sent.version[:40]!r}; install Tandem {own} on the joining host"
            )
            return _refusal("409 Conflict", why)
        self._joined(sent.address)
        return "200 OK", msgspec.json.encode(self._reply)


def _refusal(status: str, why: str) -> tuple[str, bytes]:
    return status, json.dumps({"error": why}).encode()
