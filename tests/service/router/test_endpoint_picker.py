"""An endpoint picker answers a gateway's streams: picks, subsets, refusals, bodies, health.

The gateway is a client that sends Envoy's messages; tests/e2e/test_gateway.py has a real Envoy.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
import msgspec
import pytest
import pytest_asyncio
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.api.gateway.ext_proc import CHUNK_BYTES_MAX, SERVICE
from tandem.common.config.gateway import GatewayOptions
from tandem.common.perf_model.rates import DecodeRate, PrefillRate, WorkerRates
from tandem.net.rpc.tandem.v1 import ext_proc_pb2 as pb
from tandem.net.store.client import connect
from tandem.net.store.fronts import Fronts
from tandem.router.admission import capacity
from tandem.router.placement.hint import HINT_HEADER, read
from tests.counted_turns import note_counted
from tests.service.router.conftest import BODY_BYTES_MAX, RunningRouter, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTER = {
    "unparsed_bytes_max": 8 << 20,
    "gateway": GatewayOptions(
        endpoint_picker="127.0.0.1:0",
        objectives={"batch": -1, "urgent": 5},
        picker_fallbacks=1,
        picker_stays=True,
    ),
}
ENDPOINTS = {"decode-0": "10.0.0.1:8000", "decode-1": "10.0.0.2:8000"}
CHAT = {"messages": [{"role": "user", "content": "Hello, who are you?"}], "max_tokens": 4}


class Gateway:
    """Sends one request's parts as Envoy does, and reads what comes back."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = channel.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )

    def begin(self) -> Any:
        """Returns the stream of a request whose parts the test writes."""
        return self._call(timeout=20)

    async def ask(self, *parts: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        """Returns all answers to these parts."""
        call = self._call(iter(parts), timeout=20)
        return [answer async for answer in call]

    async def pick(
        self,
        body: object = CHAT,
        *,
        path: str = "/v1/chat/completions",
        subset: object = None,
        **headers: str,
    ) -> pb.ProcessingResponse:
        """Returns the first answer to a request with this body."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        begin = headers_part(path, subset=subset, **headers)
        answers = await self.ask(begin, chunk(content, ends=True))
        return answers[0]


def headers_part(
    path: str,
    *,
    subset: object = None,
    ends: bool = False,
    mode: int = pb.FULL_DUPLEX_STREAMED,
    **headers: str,
) -> pb.ProcessingRequest:
    values = {":path": path, ":method": "POST", "x-request-id": "request-1", **headers}
    told = [
        pb.HeaderValue(key=name.replace("_", "-"), raw_value=value.encode())
        for name, value in values.items()
    ]
    part = pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=told), end_of_stream=ends),
        protocol_config=pb.ProtocolConfiguration(request_body_mode=mode, response_body_mode=mode),
    )
    if subset is not None:
        named = part.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        named.update({"x-gateway-destination-endpoint-subset": subset})
    return part


def chunk(body: bytes, *, ends: bool) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=ends))


def sets(answer: pb.ProcessingResponse) -> dict[str, str]:
    """Headers that an answer sets, by name."""
    kind = answer.WhichOneof("response")
    options = getattr(answer, kind).response.header_mutation.set_headers
    return {option.header.key: option.header.raw_value.decode() for option in options}


def endpoints(answer: pb.ProcessingResponse) -> list[str]:
    """Endpoints of a pick, which its header and its metadata must have alike."""
    picked = sets(answer)["x-gateway-destination-endpoint"]
    told = MessageToDict(answer.dynamic_metadata)
    assert told == {"envoy.lb": {"x-gateway-destination-endpoint": picked}}
    return picked.split(",")


def refusal(answer: pb.ProcessingResponse) -> tuple[int, dict[str, Any]]:
    assert answer.WhichOneof("response") == "immediate_response", answer
    told = answer.immediate_response
    return told.status.code, json.loads(told.body)["error"]


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(router: RunningRouter) -> AsyncIterator[Gateway]:
    """A gateway of two fronts, which both are known."""
    await set_fronts(router, ENDPOINTS)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.grpc_port}") as channel:
        yield Gateway(channel)


async def set_fronts(router: RunningRouter, wanted: dict[str, str]) -> None:
    """Makes these fronts known to the picker, and no others."""
    cluster = router.router.view.cluster
    assert router.router.picker is not None
    table = router.router.picker.fronts
    async with connect(cluster.redis_url) as redis:
        fronts = Fronts(redis, cluster.cluster_id)

        async def known() -> bool:
            for worker_id in ENDPOINTS:
                if worker_id in wanted:
                    await fronts.announce(worker_id, wanted[worker_id])
                else:
                    await fronts.remove(worker_id)
            return table.endpoints == wanted

        async with asyncio.timeout(10):
            while not await known():  # noqa: ASYNC110
                await asyncio.sleep(0.05)


def set_waiting(router: RunningRouter, count: int) -> None:
    for worker in router.workers:
        worker.load = msgspec.structs.replace(worker.load, num_waiting=count)
        worker.tell_load(0)


def has_capacity(router: RunningRouter) -> bool:
    snapshots = router.router.view.snapshots()
    return capacity.has_capacity(snapshots, queued_max_s=capacity.QUEUED_MAX_S)


async def test_a_pick_names_a_front_and_signs_the_placement(
    gateway: Gateway, router: RunningRouter
) -> None:
    answer = await gateway.pick()
    first, second = endpoints(answer)
    assert {first, second} == set(ENDPOINTS.values())
    token = router.router.view.cluster.token
    value = sets(answer)[HINT_HEADER]
    hint = read(value, token, request_id="request-1", now=time.time())
    assert hint is not None
    assert ENDPOINTS[hint.decode] == first
    assert "x-request-id" not in sets(answer)


async def test_a_request_without_a_usable_id_gets_one(gateway: Gateway) -> None:
    answer = await gateway.pick(x_request_id="not usable!")
    assert len(sets(answer)["x-request-id"]) == 32


@pytest.mark.parametrize("of", ["decode-0", "decode-1"])
async def test_only_endpoints_of_the_subset_are_picked(gateway: Gateway, of: str) -> None:
    subset = ["10.9.9.9:8000", ENDPOINTS[of]]
    for given in (subset, ",".join(subset), [ENDPOINTS[of].partition(":")[0]]):
        for _ in range(4):
            assert endpoints(await gateway.pick(subset=given)) == [ENDPOINTS[of]]


@pytest.mark.parametrize("subset", [[], "", ["10.9.9.9:8000"]])
async def test_a_subset_without_an_endpoint_is_answered_503(
    gateway: Gateway, subset: object
) -> None:
    status, error = refusal(await gateway.pick(subset=subset))
    assert (status, error["code"]) == (503, "no_workers")


async def test_503_while_no_worker_has_a_front(gateway: Gateway, router: RunningRouter) -> None:
    await set_fronts(router, {})
    status, error = refusal(await gateway.pick())
    assert (status, error["code"]) == (503, "no_workers")
    assert refusal((await gateway.ask(headers_part("/v1/models", ends=True)))[0])[0] == 503


async def test_a_request_to_an_empty_pool_waits_for_the_autoscaler(
    gateway: Gateway, router: RunningRouter
) -> None:
    """The gateway has its 503 at once; the autoscaler still has to hear that somebody asks."""
    view = router.router.view
    num_held = router.router.first.autoscale._num_held
    assert endpoints(await gateway.pick())
    assert num_held() == 0
    for worker in router.workers:
        worker.state = "draining"
        await worker.write_record()
    await eventually(lambda: not view.has_decode_worker())
    try:
        assert refusal(await gateway.pick())[0] == 503
        assert num_held() == 1
    finally:
        for worker in router.workers:
            worker.state = "ready"
            await worker.write_record()
        await eventually(view.has_decode_worker)
    assert num_held() == 0


@pytest.mark.parametrize("objective", ["", "urgent"])
async def test_each_pick_counts_as_demand_once(
    gateway: Gateway, router: RunningRouter, objective: str
) -> None:
    meter = router.router._metrics.demand
    before = meter.demand()
    named = {"x_gateway_inference_objective": objective} if objective else {}
    assert endpoints(await gateway.pick(**named))
    assert meter.demand().since(before).num_requests == 1


async def test_a_worker_without_a_front_is_not_picked(
    gateway: Gateway, router: RunningRouter
) -> None:
    await set_fronts(router, {"decode-1": ENDPOINTS["decode-1"]})
    for _ in range(8):
        assert endpoints(await gateway.pick()) == [ENDPOINTS["decode-1"]]


async def test_a_sheddable_request_is_answered_429_once_workers_are_full(
    gateway: Gateway, router: RunningRouter
) -> None:
    objective = {"x_gateway_inference_objective": "batch"}
    assert endpoints(await gateway.pick(**objective))
    set_waiting(router, 8)
    await eventually(lambda: not has_capacity(router))
    try:
        answer = await gateway.pick(**objective)
        status, error = refusal(answer)
        assert (status, error["code"]) == (429, "overloaded")
        told = {o.header.key for o in answer.immediate_response.headers.set_headers}
        assert "retry-after" in told
        assert endpoints(await gateway.pick())
        assert endpoints(await gateway.pick(x_gateway_inference_objective="urgent"))
    finally:
        set_waiting(router, 0)
    await eventually(lambda: has_capacity(router))


async def test_the_body_comes_back_as_it_was_sent(gateway: Gateway) -> None:
    long = {**CHAT, "user": "x" * (2 * CHUNK_BYTES_MAX)}
    content = json.dumps(long).encode()
    parts = [content[:100], content[100:]]
    answers = await gateway.ask(
        headers_part("/v1/chat/completions"),
        chunk(parts[0], ends=False),
        chunk(parts[1], ends=True),
    )
    assert [a.WhichOneof("response") for a in answers] == ["request_headers"] + ["request_body"] * (
        len(answers) - 1
    )
    streamed = [a.request_body.response.body_mutation.streamed_response for a in answers[1:]]
    assert b"".join(s.body for s in streamed) == content
    assert [s.end_of_stream for s in streamed] == [False] * (len(streamed) - 1) + [True]
    assert max(len(s.body) for s in streamed) <= CHUNK_BYTES_MAX


async def test_trailers_end_a_body_too(gateway: Gateway) -> None:
    answers = await gateway.ask(
        headers_part("/v1/chat/completions"),
        chunk(json.dumps(CHAT).encode(), ends=False),
        pb.ProcessingRequest(request_trailers=pb.HttpTrailers()),
    )
    assert [a.WhichOneof("response") for a in answers] == [
        "request_headers",
        "request_body",
        "request_trailers",
    ]
    assert endpoints(answers[0])
    assert not answers[1].request_body.response.body_mutation.streamed_response.end_of_stream


async def test_an_answer_passes_through(gateway: Gateway) -> None:
    answers = await gateway.ask(
        headers_part("/v1/models", ends=True),
        pb.ProcessingRequest(response_headers=pb.HttpHeaders()),
        pb.ProcessingRequest(response_body=pb.HttpBody(body=b"data: 1", end_of_stream=False)),
        pb.ProcessingRequest(response_body=pb.HttpBody(body=b"", end_of_stream=True)),
        pb.ProcessingRequest(response_trailers=pb.HttpTrailers()),
    )
    bodies = [
        a.response_body.response.body_mutation.streamed_response
        for a in answers
        if a.WhichOneof("response") == "response_body"
    ]
    assert [(b.body, b.end_of_stream) for b in bodies] == [(b"data: 1", False), (b"", True)]
    assert answers[-1].WhichOneof("response") == "response_trailers"


async def test_a_buffered_body_is_answered_with_the_pick(gateway: Gateway) -> None:
    answers = await gateway.ask(
        headers_part("/v1/chat/completions", mode=pb.BUFFERED),
        chunk(json.dumps(CHAT).encode(), ends=True),
        pb.ProcessingRequest(response_headers=pb.HttpHeaders()),
        pb.ProcessingRequest(response_body=pb.HttpBody(body=b"{}", end_of_stream=True)),
    )
    assert [a.WhichOneof("response") for a in answers] == [
        "request_headers",
        "request_body",
        "response_headers",
        "response_body",
    ]
    assert HINT_HEADER in sets(answers[1])
    assert not answers[3].response_body.HasField("response")


BAD_BODIES: Sequence[object] = (b"", b"{", {"messages": []}, {"prompt": 5}, {"model": "none"})


@pytest.mark.parametrize("body", BAD_BODIES)
async def test_a_front_answers_what_the_picker_cannot_read(gateway: Gateway, body: object) -> None:
    answer = await gateway.pick(body)
    assert endpoints(answer)
    assert HINT_HEADER not in sets(answer)
    removed = answer.request_headers.response.header_mutation.remove_headers
    assert list(removed) == [HINT_HEADER]  # a client's own


async def test_a_body_that_is_too_large_is_answered_413(gateway: Gateway) -> None:
    begin = headers_part("/v1/chat/completions")
    half = chunk(b"x" * (BODY_BYTES_MAX // 2 + 1), ends=False)
    (answer,) = await gateway.ask(begin, half, half)
    assert refusal(answer)[0] == 413


@pytest.mark.parametrize(
    "parts",
    [
        [chunk(b"{}", ends=True)],
        [pb.ProcessingRequest(request_trailers=pb.HttpTrailers())],
        [pb.ProcessingRequest()],
        [headers_part("/v1/models"), headers_part("/v1/models")],
    ],
    ids=["body first", "trailers first", "nothing", "headers twice"],
)
async def test_parts_in_a_wrong_order_are_answered_400(
    gateway: Gateway, parts: list[pb.ProcessingRequest]
) -> None:
    (answer,) = await gateway.ask(*parts)
    assert refusal(answer)[0] == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/messages", {**CHAT, "max_tokens": 5}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/embeddings", {"input": "Hello"}),
        ("/invocations", CHAT),
    ],
)
async def test_requests_of_all_apis_are_placed(gateway: Gateway, path: str, body: object) -> None:
    assert HINT_HEADER in sets(await gateway.pick(body, path=path))


async def test_a_pick_counts_until_its_answer_begins(
    gateway: Gateway, router: RunningRouter
) -> None:
    answer = await gateway.pick()
    assert endpoints(answer)
    assert all(not worker.submitted for worker in router.workers)  # the front submits it


@pytest.mark.parametrize(("status", "num_tokens"), [("200", 40 + 4), ("500", 40)])
async def test_a_pick_without_a_token_counts_its_prompt_only(
    gateway: Gateway,
    router: RunningRouter,
    monkeypatch: pytest.MonkeyPatch,
    status: str,
    num_tokens: int,
) -> None:
    """A pick counts the prompt and the tokens that the client allows."""
    rates = WorkerRates(PrefillRate(0.0, 1e-3, 0.0), DecodeRate(0.0, 1e-3), 100, measured=True)
    await set_rates(router, rates)
    counted_s = note_counted(monkeypatch)
    try:
        body = json.dumps({"prompt": [7] * 40, "max_tokens": 4}).encode()
        headers = [pb.HeaderValue(key=":status", raw_value=status.encode())]
        await gateway.ask(
            headers_part("/v1/completions", x_session_id="s"),
            chunk(body, ends=True),
            pb.ProcessingRequest(
                response_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=headers))
            ),
        )
        assert sum(counted_s) == pytest.approx(num_tokens * 1e-3, rel=0.01)
    finally:
        await set_rates(router, WorkerRates())


async def set_rates(router: RunningRouter, rates: WorkerRates) -> None:
    for worker in router.workers:
        worker.rates = rates
        await worker.write_record()
    known = router.router.view.known
    await eventually(lambda: all(w.record.rates == rates for w in known()))


async def test_health_has_the_protocols_names(gateway: Gateway, router: RunningRouter) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.grpc_port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> int:
            asked = health_pb2.HealthCheckRequest(service=service)
            return (await health.Check(asked)).status  # type: ignore[no-any-return]

        serving = health_pb2.HealthCheckResponse.SERVING
        for service in ("liveness", "", "readiness", SERVICE):
            assert await status(service) == serving, service
        await set_fronts(router, {})
        async with asyncio.timeout(10):
            while await status("readiness") == serving:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert await status("liveness") == serving


async def test_unfinished_bodies_have_a_bound_together(
    router: RunningRouter, gateway: Gateway
) -> None:
    """Each stream of the gateway's address sends all of its body but the end."""
    bodies = router.router._access.bodies
    parts = [headers_part("/v1/chat/completions"), chunk(b" " * (BODY_BYTES_MAX - 10), ends=False)]
    calls = [gateway.begin() for _ in range(12)]
    for call in calls:
        for part in parts:
            await call.write(part)
    refusals = [asyncio.create_task(call.read()) for call in calls]
    await eventually(lambda: sum(answer.done() for answer in refusals) >= 9)
    assert 2 << 20 < bodies.num_bytes <= 4 << 20
    refused = [refusal(answer.result()) for answer in refusals if answer.done()]
    assert {status for status, _ in refused} == {429}
    for call in calls:
        call.cancel()
    await asyncio.gather(*refusals, return_exceptions=True)
    await eventually(lambda: bodies.num_bytes == 0)
    assert endpoints(await gateway.pick())
    assert bodies.num_bytes == 0
