"""Checks the API key of a call: its metadata has it as `authorization`, as HTTP has its header."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any
from urllib.parse import unquote

import grpc.aio

from tandem.errors import TandemError, Unauthenticated
from tandem.security.access import Access, Need
from tandem.security.keys import KeyRecord

log = logging.getLogger(__name__)


class CallGuard:
    """The guard of one gRPC server; each method asks it first."""

    def __init__(self, access: Access) -> None:
        self.clients = access.clients
        self._access = access

    async def check(
        self, need: Need, context: grpc.aio.ServicerContext[Any, Any]
    ) -> KeyRecord | None:
        """Returns the call's key; None if it needs none. Raises Unauthenticated, Forbidden and
        KeysUnknown, and logs each."""
        sent = context.invocation_metadata() or ()
        authorization = [str(value) for name, value in sent if name == "authorization"]
        try:
            return self._access.check(need, authorization, now=time.time())
        except TandemError as error:
            who = caller(context)
            log.warning("refused a call of %s: %s", who, error.message)
            if isinstance(error, Unauthenticated):
                late_s = self._access.throttle.fail(self._address(context), time.monotonic())
                await asyncio.sleep(late_s)
            raise

    def place(
        self, context: grpc.aio.ServicerContext[Any, Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Counts the call among the unanswered ones of its client. Raises TooManyRequests."""
        return self.clients.request(self._address(context))

    def _address(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        sent = context.invocation_metadata() or ()
        forwarded = [str(value) for name, value in sent if name == "x-forwarded-for"]
        peer = unquote(context.peer()).partition(":")[2].rpartition(":")[0]
        return self.clients.address(peer, forwarded)


def caller(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Describes the sender of a call for logs: its address."""
    # A peer is `ipv4:127.0.0.1:40312` or `ipv6:%5B::1%5D:40312`.
    return f"{unquote(context.peer()).partition(':')[2]} over gRPC"
