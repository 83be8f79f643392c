from __future__ import annotations

import grpc
import grpc.aio
import pytest

from services.errors import LeaseLost
from services.worker.lease_stream import is_source_gone


def _rpc_error(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())


def _caused(cause: BaseException) -> LeaseLost:
    error = LeaseLost("lost")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("code", "is_gone"), [(grpc.StatusCode.UNAVAILABLE, True), (grpc.StatusCode.ABORTED, False)]
)
def test_a_lease_is_lost_with_its_source_or_without(code: grpc.StatusCode, is_gone: bool) -> None:
    error = _rpc_error(code)
    assert is_source_gone(error) is is_gone
    assert is_source_gone(_caused(error)) is is_gone
    assert is_source_gone(_caused(ExceptionGroup("of tasks", [error]))) is is_gone
    assert not is_source_gone(LeaseLost("the engine hangs"))


def test_an_error_may_be_raised_from_the_group_that_it_is_of() -> None:
    error = LeaseLost("bytes: cut")
    error.__cause__ = ExceptionGroup("of tasks", [error])
    assert not is_source_gone(error)
