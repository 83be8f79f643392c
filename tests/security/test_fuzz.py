"""A short form of the fuzzing of `tests/security/fuzz`."""

from __future__ import annotations

import os

import pytest

from tests.security.fuzz.run import fuzz

pytestmark = [pytest.mark.service, pytest.mark.timeout(170)]

NUM_INPUTS = int(os.environ.get("FUZZ_INPUTS", "1000"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
# A worker takes 5 s to start, and its calls wait; model files have a test of their own.
NAMES = ("engine-messages", "http-bytes", "http-bodies", "grpc-router", "redis-records")


def test_no_input_fails() -> None:
    done = fuzz(NAMES, NUM_INPUTS, SEED, None, 400)
    for name, progress in done.items():
        assert progress.failures == [], name
        assert progress.num_inputs > 0
