"""Access checks in front of all HTTP routes. They check API keys, and refuse calls that a foreign
web page makes a browser send. The public listener and the admin listener each have a guard.

A browser can reach every server that its user can reach, including a router on loopback. So a web
page of another site could send calls to that router. Two rules protect against such pages:

Host      A page can let its own host name resolve to 127.0.0.1 (DNS rebinding). So a call that
          arrives over loopback is refused, unless the header `Host` is a loopback name, the
          listener's address or a name of `--allowed-hosts`. If the public listener listens on
          another address than loopback, the rule does not apply to it, because clients and sidecars
          then use many names. The admin listener always applies the rule.
Origin,   A call that may change something must have the type `application/json`. A foreign page can
Content-  send this type only after a CORS preflight, which the router refuses. If the call has the
Type      header `Origin`, the origin must be the address that was called. The rule does not apply
          to routes that generate or tokenize: these routes change nothing in the cluster, and
          pages of `--cors-origins` may call them (`front.py`).
"""

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.api.anthropic.errors import is_anthropic
from tandem.api.http.errors import error_response
from tandem.common.config.router import RouterConfig
from tandem.errors import (
    Forbidden,
    ForeignPage,
    NotJson,
    NotPublic,
    RequestNotFound,
    TandemError,
    Unauthenticated,
)
from tandem.net.security.access import Access, Need, is_loopback
from tandem.net.security.audit_trail import AuditTrail, Caller
from tandem.net.security.key_service import RECORDS_PATH
from tandem.net.security.keys import KeyRecord

log = logging.getLogger(__name__)

# Routes to which the rule for `Origin` and `Content-Type` does not apply. The rule applies to all
# routes that are not listed here.
_GENERATIONS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
_TOKENS = ("/v1/embeddings", "/v1/messages/count_tokens", "/tokenize", "/detokenize")
_SCORES = (*("/v1/rerank", "/v2/rerank", "/rerank"), *("/v1/score", "/score"))
_CLASSES = ("/v1/classify", "/classify")
_OLLAMA = ("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show")
_UNGUARDED = frozenset(
    (*_GENERATIONS, *_TOKENS, *_SCORES, *_CLASSES, *_OLLAMA, "/invocations", "/ping")
)
# A file is sent as multipart/form-data. A foreign page can send that without a preflight, but its
# call has the header `Origin`, which is checked.
_UPLOADS = "/v1/files"
# routes for operators with the same paths as in vLLM
RESET_PATH = "/reset_prefix_cache"
LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_ADMIN = ("/", "/metrics", RESET_PATH, LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH)
PAGE_PREFIX = "/page/"  # paths of the files that the operators' page `/` loads
PROBES = ("/health", "/ready", "/started", "/ping")
_PORTS = {"http": 80, "https": 443}
_TEXT_MAX = 100  # text from a client is cut to this many characters in messages and logs


class RequestGuard(ABC):
    """ASGI middleware that refuses calls and logs each refusal. It also counts the open requests of
    each client address."""

    def __init__(
        self, app: ASGIApp, names: Iterable[str], access: Access, trail: AuditTrail
    ) -> None:
        """`names` are values of `Host` that the listener accepts in addition to loopback names."""
        self._app = app
        self._access = access
        self._trail = trail
        self._names = {"localhost", *names}

    @abstractmethod
    def need(self, path: str) -> Need:
        """Returns the kind of API key that a call of this path needs, or "nothing" if a call needs
        no key. Raises NotPublic if only the admin port serves the path."""

    @abstractmethod
    def checks_host(self, address: str) -> bool:
        """Returns True if the rule for `Host` (see the module) applies to calls that arrive at
        this address of the router."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        address = self._address(scope)
        scope.setdefault("state", {}).update(address=address, bodies=self._access.bodies)
        with contextlib.ExitStack() as place:
            try:
                # Health probes do not count as open requests of the address.
                if scope["path"] not in PROBES:
                    place.enter_context(self._access.clients.request(address))
                self._check(scope)
            except TandemError as error:
                claimed = self._access.claimed(_credentials(scope))
                log_refusal(self._trail, scope, error, claimed)
                if isinstance(error, Unauthenticated):
                    await asyncio.sleep(self._access.throttle.fail(address, time.monotonic()))
                await error_response(error, scope)(scope, receive, send)
            else:
                await self._app(scope, receive, send)

    def _address(self, scope: Scope) -> str:
        peer = (scope["client"] or ("unknown",))[0]
        return self._access.clients.address(peer, Headers(scope=scope).getlist("x-forwarded-for"))

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        path: str = scope["path"]
        if self.checks_host((scope["server"] or ("",))[0]):
            self._check_host(headers.getlist("host"))
        needed = self.need(path)
        if scope["method"] not in ("GET", "HEAD") and not _is_unguarded(path):
            _check_origin(headers)
            if path != _UPLOADS:
                _check_json(headers)
        key = self._access.check(needed, _credentials(scope), now=time.time())
        scope.setdefault("state", {})["key"] = key

    def _check_host(self, hosts: list[str]) -> None:
        for host in hosts:
            name = _host_name(host)
            if name not in self._names and not is_loopback(name):
                raise ForeignPage(
                    "the header Host must be localhost, 127.0.0.1 or a name in --allowed-hosts, "
                    f"not {host[:_TEXT_MAX]!r}"
                )


def public_need(path: str) -> Need | None:
    """Returns the kind of API key that a call of the public port needs: "nothing", "metrics", or by
    default "user". Returns None for paths that only the admin port serves."""
    # A call of RECORDS_PATH comes from another router, which signs it.
    if path in (*PROBES, RECORDS_PATH):
        return "nothing"
    if path == "/load":
        return "metrics"
    if path in _ADMIN or path.startswith(("/v1/cluster", "/v1/keys", PAGE_PREFIX)):
        return None
    return "user"


class PublicGuard(RequestGuard):
    """Checks calls of the public port."""

    def __init__(
        self, app: ASGIApp, config: RouterConfig, access: Access, trail: AuditTrail
    ) -> None:
        super().__init__(app, (config.host.lower(), *config.allowed_hosts), access, trail)
        self._on_loopback = is_loopback(config.host)
        self._has_ollama = config.ollama_api
        self._admin = f"port {config.admin.port} of {config.admin.host}"

    def need(self, path: str) -> Need:
        """Returns the kind of API key that a call needs. Raises NotPublic for a path of the admin
        port."""
        if path == "/" and self._has_ollama:
            return "nothing"
        if (needed := public_need(path)) is None:
            raise NotPublic(
                f"{path[:_TEXT_MAX]} is served only on the router's admin port: {self._admin} "
                "(--admin-host, --admin-port)"
            )
        return needed

    def checks_host(self, address: str) -> bool:
        return self._on_loopback and is_loopback(address)


class AdminGuard(RequestGuard):
    """Checks calls of the admin port."""

    def __init__(
        self, app: ASGIApp, config: RouterConfig, access: Access, trail: AuditTrail
    ) -> None:
        super().__init__(app, (config.admin.host.lower(), *config.allowed_hosts), access, trail)

    def need(self, path: str) -> Need:
        """Returns the kind of API key that a call needs: "nothing", "metrics", or by default
        "operator"."""
        # The operators' page and its files need no key, because they contain no cluster data.
        if path in (*PROBES, "/") or path.startswith(PAGE_PREFIX):
            return "nothing"
        return "metrics" if path == "/metrics" else "operator"

    def checks_host(self, address: str) -> bool:
        return is_loopback(address)


def log_refusal(
    trail: AuditTrail, scope: Mapping[str, Any], error: TandemError, key: KeyRecord | None = None
) -> None:
    """Logs a refused call. If the call was refused because of its API key or its tenant, the audit
    trail records the call, too."""
    who = caller(scope, key)
    call = f"{scope['method']} {scope['path']}"[:_TEXT_MAX]
    log.warning("refused the call %r from %s: %s", call, who, error.message)
    if isinstance(error, Unauthenticated | Forbidden | RequestNotFound):
        trail.add_refusal(who, call, error)


def caller(scope: Mapping[str, Any], key: KeyRecord | None = None) -> Caller:
    """Describes the sender of a request by three things: the address of the connection, the address
    in a proxy's `X-Forwarded-For`, and the API key."""
    key = scope.get("state", {}).get("key") or key
    peer = ":".join(map(str, scope["client"] or ("unknown",)))
    forwarded = Headers(scope=scope).get("x-forwarded-for")  # type: ignore[arg-type]
    address = f"{peer} over HTTP" + (f" for {forwarded[:_TEXT_MAX]!r}" if forwarded else "")
    return Caller(address, key.key_id, key.tenant) if key else Caller(address)


def _is_unguarded(path: str) -> bool:
    # `/v1/responses/ID` and `/v1/files/ID` accept DELETE. OpenAI's client sends no body with it, so
    # no content type can be required. The rule is also not needed, because web pages need a CORS
    # preflight for DELETE.
    return path in _UNGUARDED or path.startswith(("/v1/responses/", f"{_UPLOADS}/"))


def _credentials(scope: Mapping[str, Any]) -> list[str]:
    """Returns the values of the header `Authorization`. Clients of Anthropic's API may send the key
    in `x-api-key` instead."""
    headers = Headers(scope=scope)  # type: ignore[arg-type]
    sent = headers.getlist("authorization")
    if sent or not is_anthropic(scope):
        return sent
    return [f"Bearer {key}" for key in headers.getlist("x-api-key")]


def _check_origin(headers: Headers) -> None:
    """Raises ForeignPage if the `Origin` of a call differs from the address that was called. A
    proxy in front of the router may give the scheme of this address in `X-Forwarded-Proto`. A web
    page cannot set this header without a CORS preflight."""
    scheme = headers.get("x-forwarded-proto", "http").partition(",")[0].strip().lower()
    own = _address(f"{scheme}://{headers.get('host', '')}")
    for origin in headers.getlist("origin"):
        if own is None or _address(origin) != own:
            raise ForeignPage(
                f"the header Origin is {origin[:_TEXT_MAX]!r}; only web pages with the address of "
                "this router may send this request"
            )


def _check_json(headers: Headers) -> None:
    sent = headers.getlist("content-type")
    if [value.partition(";")[0].strip().lower() for value in sent] != ["application/json"]:
        raise NotJson(
            "send the header Content-Type: application/json, not "
            + repr(", ".join(sent)[:_TEXT_MAX] or "none")
        )


def _address(origin: str) -> tuple[str, str, int] | None:
    """Splits an origin such as `https://example.org` into scheme, host and port. Returns None for
    `null` and malformed origins."""
    try:
        parts = urlsplit(origin)
        port = parts.port or _PORTS[parts.scheme]
    except (ValueError, KeyError):
        return None
    return (parts.scheme, parts.hostname, port) if parts.hostname else None


def _host_name(host: str) -> str:
    """Returns the host name in a `Host` header, without the port. Returns "" if the header is
    malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
