from __future__ import annotations

import grpc
import grpc.aio
import pytest

from tandem.errors import LeaseLost
from tandem.worker.kv_pulls.lease_stream import is_producer_gone

UNAVAILABLE, ABORTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED


def _rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


def _caused(cause: BaseException) -> LeaseLost:
    error = LeaseLost("lost")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("code", "details", "is_gone"),
    [
        (UNAVAILABLE, "Stream removed (recvmsg:Connection reset by peer (104))", True),
        (UNAVAILABLE, "Socket closed", True),
        (UNAVAILABLE, "Stream removed (recvmsg:Connection timed out (110))", False),
        (UNAVAILABLE, "ping timeout", False),
        (UNAVAILABLE, "failed to connect to all addresses; last error: Connection refused", False),
        (ABORTED, "", False),
    ],
)
def test_a_lease_is_lost_with_its_producer_or_without(
    code: grpc.StatusCode, details: str, is_gone: bool
) -> None:
    error = _rpc_error(code, details)
    assert is_producer_gone(error) is is_gone
    assert is_producer_gone(_caused(error)) is is_gone
    assert is_producer_gone(_caused(ExceptionGroup("of tasks", [error]))) is is_gone
    assert not is_producer_gone(LeaseLost("the engine hangs"))


def test_an_error_may_be_raised_from_the_group_that_it_is_of() -> None:
    error = LeaseLost("bytes: cut")
    error.__cause__ = ExceptionGroup("of tasks", [error])
    assert not is_producer_gone(error)
