"""Checks the API key of a call: its metadata has it as `authorization`, as HTTP has its header."""

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

_STATUS_SENT_S = 1.0  # from the end of a call


class CallGuard:
    """The guard of one gRPC server; each method asks it first."""

    def __init__(self, access: Access, trail: AuditTrail) -> None:
        self.clients = access.clients
        self.live_peers: Counter[Peer] = Counter()  # with a call whose key was accepted
        self._access = access
        self._trail = trail

    async def check(
        self, need: Need, context: grpc.aio.ServicerContext[Any, Any], method: str
    ) -> KeyRecord | None:
        """Returns the call's key; None if it needs none. Raises Unauthenticated, Forbidden and
        KeysUnknown, and logs each with the name of the `method`."""
        sent = context.invocation_metadata() or ()
        authorization = [str(value) for name, value in sent if name == "authorization"]
        try:
            key = self._access.check(need, authorization, now=time.time())
            self._note_live(context)
            return key
        except TandemError as error:
            self.tell(context, method, self._access.claimed(authorization), error)
            if isinstance(error, Unauthenticated):
                late_s = self._access.throttle.fail(self._address(context), time.monotonic())
                await asyncio.sleep(late_s)
            raise

    def _note_live(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Counts the peer among the live ones until a moment after the end of the call, by when
        gRPC has sent its status."""
        address, _, port = _peer(context).rpartition(":")
        if not port.isdecimal():  # a socket of this machine without addresses
            return
        peer = peer_of(address.strip("[]").partition("%")[0], int(port))
        self.live_peers[peer] += 1

        def forget() -> None:
            self.live_peers[peer] -= 1
            if not self.live_peers[peer]:
                del self.live_peers[peer]

        def end(_: Any) -> None:
            asyncio.get_running_loop().call_later(_STATUS_SENT_S, forget)

        context.add_done_callback(end)  # type: ignore[arg-type]  # its stub is no protocol

    def tell(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        method: str,
        key: KeyRecord | None,
        error: TandemError,
    ) -> None:
        """Logs a refused call. The audit trail has those that are about keys and tenants."""
        who = caller(context, key)
        log.warning("refused a call %s of %s: %s", method, who, error.message)
        if isinstance(error, Unauthenticated | Forbidden | RequestNotFound):
            self._trail.add_refusal(who, method, error)

    def place(
        self, context: grpc.aio.ServicerContext[Any, Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Counts the call among the unanswered ones of its client. Raises TooManyRequests."""
        return self.clients.request(self._address(context))

    def _address(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        sent = context.invocation_metadata() or ()
        forwarded = [str(value) for name, value in sent if name == "x-forwarded-for"]
        return self.clients.address(_peer(context).rpartition(":")[0], forwarded)


def caller(context: grpc.aio.ServicerContext[Any, Any], key: KeyRecord | None) -> Caller:
    """Describes the sender of a call: its address and its key."""
    address = f"{_peer(context)} over gRPC"
    return Caller(address, key.key_id, key.tenant) if key else Caller(address)


def peer_address(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Returns the address of a connection's other end."""
    return _peer(context).rpartition(":")[0]


def _peer(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    # A peer is `ipv4:127.0.0.1:40312` or `ipv6:%5B::1%5D:40312`.
    return unquote(context.peer()).partition(":")[2]
