"""Targets of a worker: messages of peers and routers over gRPC, and those between its processes."""

from __future__ import annotations

import os
from typing import Any

import grpc
import msgspec
import psutil
from hypothesis import strategies as st

from tandem.engine.types import Mode, SamplingParams, SequenceSpec
from tandem.rpc.auth import token_metadata
from tandem.rpc.tandem.v1 import worker_pb2 as pb
from tandem.worker.engine_process import messages
from tests.harness.cluster import WorkerProcess
from tests.security.fuzz.inputs import changed

DEADLINE_S = 20.0
_PATIENCE_S = 0.02  # for an answer of a call that may rightly stay open
_SPEC = SequenceSpec("s", [1, 2, 3], 3, Mode.LOCAL, SamplingParams(), 4)
_COMMANDS = [
    messages.Add(_SPEC),
    messages.StartLocalPrefill("s"),
    messages.Restart(_SPEC),
    messages.Commit("s", 1),
    messages.ContinuePrefill("s", 1),
    messages.Remove("s"),
]
_SUBMIT = pb.SubmitSequence(
    request_id="r",
    attempt=1,
    input=pb.SequenceInput(token_ids=[1, 2, 3], max_tokens=2),
)
_CALLS: dict[str, Any] = {
    "Decode": pb.DecodeCommand(submit=_SUBMIT),
    "Prefill": pb.PrefillCommand(),
    "FetchBlocks": pb.FetchBlocksRequest(),
    "Probe": pb.ProbeRequest(),
    "ListChains": pb.ListChainsRequest(),
    "ListBlocks": pb.ListBlocksRequest(),
    "Connect": pb.ConnectRequest(),
    "GetState": pb.GetStateRequest(),
    "SetRole": pb.SetRoleRequest(role="decode"),
}
_STAY_OPEN = ("Decode", "Prefill")


class WorkerCalls:
    """Bytes as the message of each call of the private port, with the cluster's token or not."""

    name = "grpc-worker"

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker
        self._channel = grpc.insecure_channel(worker.address)
        wholes = [message.SerializeToString() for message in _CALLS.values()]
        self.inputs = st.tuples(st.sampled_from(list(_CALLS)), changed(wholes), st.booleans())

    def rss_bytes(self) -> int:
        process = psutil.Process(self._worker.process.pid)
        family = [process, *process.children(recursive=True)]
        return sum(int(p.memory_info().rss) for p in family)

    def check(self, value: tuple[str, bytes, bool]) -> None:
        method, body, has_token = value
        metadata = token_metadata(self._worker.token) if has_token else None
        deadline_s = _PATIENCE_S if method in _STAY_OPEN else DEADLINE_S
        call = self._channel.stream_stream(f"/tandem.v1.Worker/{method}")(
            iter([body]), timeout=deadline_s, metadata=metadata
        )
        try:
            for _ in call:
                pass
        except grpc.RpcError as error:
            code = error.code().name
        else:
            code = "OK"
        bad = {"INTERNAL", "DATA_LOSS", "UNKNOWN"}
        if method not in _STAY_OPEN:
            bad.add("DEADLINE_EXCEEDED")
        assert code not in bad, (method, code)
        assert has_token or code in ("UNAUTHENTICATED", "DEADLINE_EXCEEDED"), (method, code)

    def check_integrity(self) -> None:
        """Raises AssertionError if the worker lost a block, or is gone."""
        state = self._worker.state()
        assert state.integrity_ok, state.integrity_message


class EngineMessages:
    """Messages between the two processes of a worker, as each of them parses them."""

    name = "engine-messages"

    def __init__(self) -> None:
        self.inputs = changed([msgspec.msgpack.encode(command) for command in _COMMANDS])
        self._decoders = [
            msgspec.msgpack.Decoder(messages.Command),
            msgspec.msgpack.Decoder(messages.Reply),
        ]

    def rss_bytes(self) -> int:
        return int(psutil.Process(os.getpid()).memory_info().rss)

    def check(self, value: bytes) -> None:
        for decoder in self._decoders:
            try:
                command = decoder.decode(value)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            again = msgspec.msgpack.encode(command)
            assert msgspec.msgpack.encode(decoder.decode(again)) == again
