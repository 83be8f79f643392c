"""The tree of errors: what each tells a client, and that it survives the way between processes."""

from __future__ import annotations

import grpc
import pytest

from tandem import errors
from tandem.errors import InternalError, QueueFull, TandemError, from_code


def all_errors(root: type[TandemError] = TandemError) -> list[type[TandemError]]:
    return [root, *(e for child in root.__subclasses__() for e in all_errors(child))]


@pytest.mark.parametrize("kind", all_errors())
def test_codes_are_real_and_the_message_is_kept(kind: type[TandemError]) -> None:
    assert hasattr(grpc.StatusCode, kind.grpc_code)
    assert 400 <= kind.http_status < 600
    error = kind("what went wrong", param="seed", retry_after_s=2.5)
    assert str(error) == error.message == "what went wrong"
    assert (error.param, error.retry_after_s) == ("seed", 2.5)


@pytest.mark.parametrize("kind", [e for e in all_errors() if e is not TandemError])
def test_a_code_names_one_error_on_the_other_side(kind: type[TandemError]) -> None:
    error = from_code(kind.code, "m", retry_after_s=1.0)
    assert type(error) is kind
    assert (error.message, error.retry_after_s) == ("m", 1.0)


def test_an_unknown_code_is_an_internal_error() -> None:
    error = from_code("of_a_newer_version", "m")
    assert type(error) is InternalError
    assert error.message == "m"


def test_client_errors_are_those_with_a_client_status() -> None:
    for kind in all_errors():
        is_input = kind.grpc_code in {"INVALID_ARGUMENT", "NOT_FOUND", "UNAUTHENTICATED"}
        if is_input:
            assert 400 <= kind.http_status < 500
    assert QueueFull.http_status == 429


def test_the_docstring_draws_the_whole_tree() -> None:
    drawn = errors.__doc__ or ""
    for kind in all_errors():
        (line,) = (row for row in drawn.splitlines() if row.split()[:1] == [kind.__name__])
        if kind is not TandemError:
            assert line.split()[1:3] == [str(kind.http_status), kind.grpc_code]
            depth = (len(line) - len(line.lstrip())) // 2
            assert len(kind.__mro__) - len(TandemError.__mro__) == depth - 2
