"""Attacks over real sockets, on the router that the tests of tests/service/router use."""

from tests.service.router.conftest import router, running

__all__ = ["router", "running"]
