"""Targets of a router: raw bytes and bodies over HTTP, messages over gRPC, records in Redis."""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import msgspec
import psutil
from hypothesis import strategies as st

from tandem.rpc.tandem.v1 import cluster_pb2, inference_pb2
from tandem.security import keys
from tandem.store.client import connect_blocking
from tandem.store.registry import Registry, WorkerRecord
from tests.harness.router_process import RouterProcess
from tests.harness.scripted_worker import compatibility
from tests.security.fuzz.inputs import absurd_fields, changed

DEADLINE_S = 20.0  # for an answer; a later one is a hang
COMPLETION = {"prompt": "x", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
_NAMES = [
    *("prompt", "messages", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p"),
    *("top_k", "min_p", "seed", "n", "stop", "stream", "stream_options", "stop_token_ids"),
    *("ignore_eos", "logprobs", "echo", "best_of", "suffix", "user", "tools", "response_format"),
    *("logit_bias", "presence_penalty", "return_token_ids", "echo", "no such field"),
]
_HEAD = "{} {} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@dataclass
class _OfRouter:
    router: RouterProcess
    name: str = ""
    inputs: st.SearchStrategy[Any] = field(default_factory=st.nothing)

    def rss_bytes(self) -> int:
        return int(psutil.Process(self.router.pid).memory_info().rss)

    def assert_healthy(self) -> None:
        answer = httpx.get(f"http://127.0.0.1:{self.router.http_port}/ready", timeout=DEADLINE_S)
        assert answer.status_code == 200, answer.text


def _raw_requests() -> list[bytes]:
    found = [b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2]
    for path, body in (("completions", COMPLETION), ("chat/completions", CHAT)):
        text = json.dumps(body).encode()
        head = _HEAD.format("POST", f"/v1/{path}").encode()
        found.append(head + b"content-length: %d\r\n\r\n%s" % (len(text), text))
        chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(text), text)
        found.append(head + chunked)
    for path in ("models", "requests/x", "cluster", "keys"):
        more = "authorization: Bearer tandem-a-b\r\nx-forwarded-for: 1.2.3.4\r\n\r\n"
        found.append((_HEAD.format("GET", f"/v1/{path}") + more).encode())
    return found


class RawHttp(_OfRouter):
    """Bytes on a connection of their own."""

    def __init__(self, router: RouterProcess) -> None:
        super().__init__(router, "http-bytes", changed(_raw_requests()))

    def check(self, value: bytes) -> None:
        with socket.create_connection(("127.0.0.1", self.router.http_port), DEADLINE_S) as sock:
            answer = b""
            try:
                sock.sendall(value)
                sock.shutdown(socket.SHUT_WR)
                while part := sock.recv(1 << 16):
                    answer += part
            except ConnectionError:
                pass  # it was closed with bytes unread
            except TimeoutError:
                raise AssertionError(f"no end within {DEADLINE_S} s") from None
        assert b"HTTP/1.1 5" not in answer, answer


class HttpBodies(_OfRouter):
    """JSON bodies of completions and chats, on one connection."""

    def __init__(self, router: RouterProcess) -> None:
        bodies = st.one_of(
            st.tuples(st.just("completions"), absurd_fields(COMPLETION, _NAMES)),
            st.tuples(st.just("chat/completions"), absurd_fields(CHAT, _NAMES)),
        )
        super().__init__(router, "http-bodies", bodies)
        self._connection = self._connect()

    def check(self, value: tuple[str, dict[str, Any]]) -> None:
        path, body = value
        for name in ("max_tokens", "max_completion_tokens", "n", "best_of"):  # large ones are slow
            if isinstance(body.get(name), int | float) and body[name] > 3:
                body = body | {name: 3}
        text = json.dumps(body)
        headers = {"content-type": "application/json"}
        try:
            self._connection.request("POST", f"/v1/{path}", text, headers)
            answer = self._connection.getresponse()
            told = answer.read()
        except (http.client.HTTPException, ConnectionError):
            self._connection = self._connect()  # it was closed before this one came, or after
            self.assert_healthy()
            return
        assert answer.status < 500, told

    def _connect(self) -> http.client.HTTPConnection:
        port = self.router.http_port
        return http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)


_CLUSTER = "/tandem.v1.Cluster/"
_CALLS: dict[str, Any] = {
    "/tandem.v1.Inference/Generate": inference_pb2.GenerateRequest(text="x", max_tokens=1),
    "/tandem.v1.Inference/GetRequest": inference_pb2.GetRequestRequest(request_id="x"),
    "/tandem.v1.Inference/ListModels": inference_pb2.ListModelsRequest(),
    f"{_CLUSTER}GetCluster": cluster_pb2.GetClusterRequest(),
    f"{_CLUSTER}ScalePools": cluster_pb2.ScalePoolsRequest(sizes={"decode": 1}),
    f"{_CLUSTER}SetWorkerRole": cluster_pb2.SetWorkerRoleRequest(worker_id="x", role="decode"),
    f"{_CLUSTER}FlipWorker": cluster_pb2.SetWorkerRoleRequest(worker_id="x", role="decode"),
    f"{_CLUSTER}DrainWorker": cluster_pb2.DrainWorkerRequest(worker_id="x", deadline_s=1.0),
    "/grpc.health.v1.Health/Check": None,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": None,
}
# gRPC parses the messages of its own streams itself, and answers so.
_PARSED_BY_GRPC = "/grpc.reflection"


class RouterCalls(_OfRouter):
    """Bytes as the message of each call of the public port and of the operators' one."""

    def __init__(self, router: RouterProcess) -> None:
        wholes = [m.SerializeToString() for m in _CALLS.values() if m is not None]
        calls = st.tuples(st.sampled_from(list(_CALLS)), changed(wholes))
        super().__init__(router, "grpc-router", calls)
        ports = router.grpc_port, router.admin_grpc_port
        self._channels = [grpc.insecure_channel(f"127.0.0.1:{port}") for port in ports]

    def check(self, value: tuple[str, bytes]) -> None:
        method, body = value
        channel = self._channels[method.startswith(_CLUSTER)]
        try:
            for _ in channel.stream_stream(method)(iter([body]), timeout=DEADLINE_S):
                pass
        except grpc.RpcError as error:
            code, details = error.code().name, error.details()
        else:
            return
        bad = {"INTERNAL", "DATA_LOSS", "DEADLINE_EXCEEDED"}
        if not method.startswith(_PARSED_BY_GRPC):
            bad.add("UNKNOWN")
        assert code not in bad, (method, code, details)


class RedisRecords(_OfRouter):
    """Records of workers and keys, and entries of the prefix tree, as a router reads them.

    They lie in the Redis of a router that serves. It reads within a second, so each of them is also
    read here, by the same code; the router has to stay ready.
    """

    _AT_ONCE = 200

    def __init__(self, router: RouterProcess) -> None:
        super().__init__(router, "redis-records")
        record = WorkerRecord(
            worker_id="fuzz",
            epoch="e",
            role="decode",
            pool="decode",
            state="ready",
            address="127.0.0.1:1",
            metrics_address="",
            host="here",
            pid=1,
            model="x",
            max_model_len=2048,
            compatibility=compatibility("x"),
        )
        worker = msgspec.to_builtins(record)
        key = msgspec.to_builtins(keys.create("acme", "user", now=0.0).record)
        fields = list(worker), list(key)
        self.inputs = st.one_of(
            st.tuples(st.just("worker"), changed([msgspec.msgpack.encode(record)])),
            st.tuples(st.just("worker"), absurd_fields(worker, fields[0]).map(_packed)),
            st.tuples(st.just("key"), absurd_fields(key, fields[1]).map(_dumped)),
            st.tuples(st.just("key"), changed([msgspec.json.encode(key)])),
            st.tuples(st.just("tree"), st.binary(max_size=12)),
        )
        self._redis = connect_blocking(router.cluster.redis_url)
        self._registry = Registry(self._redis, router.cluster)  # type: ignore[arg-type]
        self._num_written = 0

    def check(self, value: tuple[str, bytes]) -> None:
        kind, data = value
        self._num_written += 1
        slot = self._num_written % self._AT_ONCE
        name = f"fuzz-{slot}"
        cluster = self.router.cluster.cluster_id
        prefix = f"{{tandem:{cluster}}}"
        if kind == "worker":
            self._redis.set(f"{prefix}:worker:{name}", data, px=3000)
            self._redis.sadd(f"{prefix}:workers", name)
            self._registry._decode(name, data)
        elif kind == "key":
            self._redis.hset(f"{prefix}:keys", name, data)
            self._redis.incr(f"{prefix}:keys:changes")
        else:
            tree = f"{{tandem:{cluster}:0}}:prefix"
            self._redis.hset(tree, ["slot:fuzz", "live", "worker:1", "next"][slot % 4], data)
        if slot == 0:
            self._ask()

    def _ask(self) -> None:
        """Asks what uses the records, while they are there; then removes them."""
        public = f"http://127.0.0.1:{self.router.http_port}"
        admin = f"http://127.0.0.1:{self.router.admin_port}"
        with httpx.Client(timeout=DEADLINE_S) as client:
            for url in (f"{admin}/v1/cluster", f"{admin}/metrics", f"{public}/ready"):
                answer = client.get(url)
                assert answer.status_code == 200, (url, answer.text)
            answer = client.post(f"{public}/v1/completions", json=COMPLETION)
            assert answer.status_code < 500, answer.text
        cluster = self.router.cluster.cluster_id
        self._redis.delete(f"{{tandem:{cluster}:0}}:prefix", f"{{tandem:{cluster}}}:keys")


def _packed(fields: dict[str, Any]) -> bytes:
    try:
        return msgspec.msgpack.encode(fields)
    except (OverflowError, UnicodeEncodeError):  # numbers above 64 bits, lone surrogates
        return b""


def _dumped(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()
