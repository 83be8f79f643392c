"""A short run of the fuzzing in `tests/security/fuzz`, and inputs that it found."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import grpc
import pytest

from tandem.net.rpc.auth import token_metadata
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tests.security.fuzz.examples import SUBMIT, WORKER_CALLS
from tests.security.fuzz.run import PARSERS, SOCKETS, Run, fuzz_parsers, fuzz_sockets
from tests.security.fuzz.served import DEADLINE_S, Served, serving

pytestmark = [pytest.mark.service, pytest.mark.timeout(170)]

NUM_INPUTS = int(os.environ.get("FUZZ_INPUTS", "5000"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("fuzz")) as served:
        yield served


def assert_no_failures(run: Run) -> None:
    for name, progress in run.progress.items():
        assert progress.failures == [], name
        assert progress.num_inputs > 0


def test_no_input_of_a_parser_fails() -> None:
    run = Run(NUM_INPUTS, SEED, None)
    fuzz_parsers(run, list(PARSERS))
    assert_no_failures(run)


@pytest.mark.parametrize("method", WORKER_CALLS)
@pytest.mark.parametrize("body", [b"\xff", b"\x0a\x7fx", b"\x0b" * 9], ids=["tag", "cut", "group"])
def test_bytes_that_are_no_message_are_refused(served: Served, method: str, body: bytes) -> None:
    with grpc.insecure_channel(served.worker.address) as channel:
        call = channel.unary_stream(f"/tandem.v1.Worker/{method}")
        metadata = token_metadata(served.worker.token)
        with pytest.raises(grpc.RpcError) as raised:
            list(call(body, timeout=DEADLINE_S, metadata=metadata))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "UTF-8" in raised.value.details()


@pytest.mark.parametrize("bias", [float("nan"), float("inf"), 3e38])
def test_a_bias_that_is_no_number_is_refused_and_the_engine_goes_on(
    served: Served, bias: float
) -> None:
    """Regression: sampling from such logits did not terminate, and the worker ended itself."""
    submit = pb.SubmitSequence()
    submit.CopyFrom(SUBMIT)
    submit.input.sampling.logit_bias[5] = bias
    answered = threading.Event()

    def commands() -> Iterator[bytes]:
        yield pb.DecodeCommand(submit=submit).SerializeToString()
        answered.wait(DEADLINE_S)  # the end of the stream would abort the request

    metadata = token_metadata(served.worker.token)
    with grpc.insecure_channel(served.worker.address) as channel:
        call = channel.stream_stream("/tandem.v1.Worker/Decode")
        told = map(
            pb.DecodeUpdate.FromString, call(commands(), timeout=DEADLINE_S, metadata=metadata)
        )
        update = next(one for update in told for one in update.sequences if one.finish_reason)
        answered.set()
    assert update.error.code == "invalid_request"
    assert f"logit_bias is {bias:g}" in update.error.message
    asyncio.run(served.check())


def test_a_lease_ends_with_bytes_that_are_no_message(served: Served) -> None:
    """The worker has accepted the lease before the malformed bytes arrive."""
    hold = pb.HoldBlocks(lease_id="l", block_hashes=[b"x" * 32], consumer_worker_id="w")
    opening = pb.PrefillCommand(hold=hold).SerializeToString()
    with grpc.insecure_channel(served.worker.address) as channel:
        call = channel.stream_stream("/tandem.v1.Worker/Prefill")
        metadata = token_metadata(served.worker.token)
        events = call(iter([opening, b"\xff"]), timeout=DEADLINE_S, metadata=metadata)
        told = [pb.PrefillEvent.FromString(event) for event in events]
    assert "invalid_request" in told[-1].refused.message
    asyncio.run(served.check())


def test_no_input_by_a_socket_fails(served: Served) -> None:
    """Runs last, because keys in Redis may close the router."""
    run = Run(NUM_INPUTS, SEED, None)
    asyncio.run(fuzz_sockets(run, served, list(SOCKETS)))
    assert_no_failures(run)
