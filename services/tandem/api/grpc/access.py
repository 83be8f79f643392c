"""Checks the API key of a gRPC call. Clients send the key in the metadata `authorization`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from typing import Any
from urllib.parse import unquote

import grpc.aio

from tandem.api.grpc.connections import Peer, peer_of
from tandem.errors import Forbidden, RequestNotFound, TandemError, Unauthenticated
from tandem.net.security.access import Access, Need
from tandem.net.security.audit_trail import AuditTrail, Caller
from tandem.net.security.keys import KeyRecord

log = logging.getLogger(__name__)

_STATUS_SENT_S = 1.0  # seconds that gRPC may need to send the status after a call has ended


class CallGuard:
    """Checks the API keys of the calls to one gRPC server. The handler of each gRPC method calls
    `check` first."""

    def __init__(self, access: Access, trail: AuditTrail) -> None:
        self.clients = access.clients
        # (address, port) of a client's connection -> number of open calls with an accepted key
        self.live_peers: Counter[Peer] = Counter()
        self._access = access
        self._trail = trail

    async def check(
        self, need: Need, context: grpc.aio.ServicerContext[Any, Any], method: str
    ) -> KeyRecord | None:
        """Checks the API key of a call. Returns the key's record, or None if the call needs no key.
        Raises Unauthenticated, Forbidden or KeysUnknown. A refused call is logged with the method's
        name."""
        sent = context.invocation_metadata() or ()
        authorization = [str(value) for name, value in sent if name == "authorization"]
        try:
            key = self._access.check(need, authorization, now=time.time())
            self._note_live(context)
            return key
        except TandemError as error:
            self.log_refusal(context, method, self._access.claimed(authorization), error)
            if isinstance(error, Unauthenticated):
                delay_s = self._access.throttle.fail(self._address(context), time.monotonic())
                await asyncio.sleep(delay_s)
            raise

    def _note_live(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Counts the call in `live_peers` until _STATUS_SENT_S after the end of the call. When
        the server stops, it closes all connections that are not in `live_peers`. The extra time
        lets gRPC send the status of the call first."""
        address, _, port = _peer(context).rpartition(":")
        if not port.isdecimal():  # clients over a Unix socket have no port
            return
        peer = peer_of(address.strip("[]").partition("%")[0], int(port))
        self.live_peers[peer] += 1

        def forget() -> None:
            self.live_peers[peer] -= 1
            if not self.live_peers[peer]:
                del self.live_peers[peer]

        def end(_: Any) -> None:
            asyncio.get_running_loop().call_later(_STATUS_SENT_S, forget)

        context.add_done_callback(end)  # type: ignore[arg-type]  # the stub declares a class

    def log_refusal(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        method: str,
        key: KeyRecord | None,
        error: TandemError,
    ) -> None:
        """Logs a refused call. If the call was refused because of its API key or its tenant, the
        audit trail records the call, too."""
        who = caller(context, key)
        log.warning("refused the call %s from %s: %s", method, who, error.message)
        if isinstance(error, Unauthenticated | Forbidden | RequestNotFound):
            self._trail.add_refusal(who, method, error)

    def place(
        self, context: grpc.aio.ServicerContext[Any, Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager. Inside it, the call counts as an open call of the client's
        address. Raises TooManyRequests if this address has too many open calls."""
        return self.clients.request(self._address(context))

    def _address(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        sent = context.invocation_metadata() or ()
        forwarded = [str(value) for name, value in sent if name == "x-forwarded-for"]
        return self.clients.address(_peer(context).rpartition(":")[0], forwarded)


def caller(context: grpc.aio.ServicerContext[Any, Any], key: KeyRecord | None) -> Caller:
    """Describes the sender of a call by its address and key."""
    address = f"{_peer(context)} over gRPC"
    return Caller(address, key.key_id, key.tenant) if key else Caller(address)


def peer_address(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Extracts the peer's address, without the port."""
    return _peer(context).rpartition(":")[0]


def _peer(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    # A peer is `ipv4:127.0.0.1:40312` or `ipv6:%5B::1%5D:40312`.
    return unquote(context.peer()).partition(":")[2]
