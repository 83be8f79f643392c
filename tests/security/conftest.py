"""Attacks over real sockets, on the router that the tests of tests/service/router use."""

from tests.service.router.conftest import model_folder, router, running

__all__ = ["model_folder", "router", "running"]
