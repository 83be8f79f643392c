"""Clients of a chaos run: prompts with exactly known tokens, sent in a closed loop.

Half of the requests use HTTP, half gRPC, all as streams; some clients disconnect early. Every
request ends as one `Outcome` within bounded time. A stream that ends because its router was killed
is a separate outcome, and its client sends the request once more.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import grpc
import grpc.aio
import httpx

from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tandem.router.request.request import REQUEST_ID_HEADER
from tests.harness.client import complete, golden, open_client
from tests.harness.cluster import Served
from tests.harness.kv_form import KvForm

MAX_TOKENS = 12  # length of a short answer
SHARE_OF_LEAVERS = 0.2
LEAVES_WITHIN_S = 4.0


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    expected: list[int]  # at least MAX_TOKENS tokens; computed or from a reference
    # fields with the same names in HTTP, gRPC and the engine's SamplingParams
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0})


@dataclass(frozen=True)
class Request:
    number: int
    prompt: Prompt
    max_tokens: int
    api: Literal["http", "grpc"]
    leaves_after_s: float | None


@dataclass
class Outcome:
    """The answer as seen by a client. `ends` has the finish reasons or error codes that ended the
    stream."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    cut_short: Literal["", "left", "hung", "router lost"] = ""
    seconds: float = 0.0
    cached_tokens: int = 0  # prompt tokens whose KV was reused, once the request has finished
    was_heard: bool = True  # False: the client disconnected before the router had read the request
    name: str = field(default_factory=lambda: uuid.uuid4().hex)  # the client's request id
    is_retry: bool = False  # True for the second attempt of a request whose router was killed

    @property
    def kind(self) -> str:
        """`finished`, `left`, `hung`, or the failure."""
        if self.cut_short:
            return self.cut_short
        return "finished" if self.ends == ["length"] else "+".join(self.ends) or "nothing"


@dataclass
class RouterLife:
    """The router's deaths, recorded by the test that kills it and waits until it is ready again."""

    num_deaths: int = 0
    is_up: asyncio.Event = field(default_factory=asyncio.Event)
    num_retries: int = 0  # retries under way; another death would be the second one for a request

    def __post_init__(self) -> None:
        self.is_up.set()

    @contextmanager
    def death(self) -> Iterator[None]:
        """Stops all clients while the block runs, which kills the router and waits for its
        return."""
        self.num_deaths += 1
        self.is_up.clear()
        yield
        self.is_up.set()


def golden_prompts(
    rng: Random, numbers: Sequence[int], *, answer_min: int = MAX_TOKENS
) -> list[Prompt]:
    """Reference prompts, each extended by a part of its reference answer; the rest is the expected
    answer."""
    made = []
    for prompt, answer in zip(*golden(*numbers), strict=True):
        start = rng.randrange(len(answer) - answer_min)
        made.append(Prompt([*prompt, *answer[:start]], answer[start:]))
    return made


async def computed_prompts(
    cluster: Served, rng: Random, lengths: Sequence[int], *, answer: int = MAX_TOKENS
) -> list[Prompt]:
    """Random prompts without references, answered one at a time by the cluster; each prefix is
    shared by two."""
    text = golden(7)[0][0]
    made = []
    async with open_client(cluster) as client:
        for number, length in enumerate(lengths):
            if number % 2 == 0:
                start = rng.randrange(len(text) - max(lengths))
            tokens = [*text[start : start + length - 1], rng.randrange(100, 40_000)]
            expected = await complete(client, tokens, max_tokens=answer)
            made.append(Prompt(tokens, expected.token_ids))
    return made


async def answered(cluster: Served, prompts: list[Prompt], form: KvForm) -> list[Prompt]:
    """Replaces the expected answers for this form: references if they exist, else this cluster's
    own answers, computed one at a time."""
    if form.has_references:
        return prompts
    async with open_client(cluster) as client:
        return [
            Prompt(
                p.token_ids,
                (await complete(client, p.token_ids, max_tokens=len(p.expected))).token_ids,
            )
            for p in prompts
        ]


def requests(
    rng: Random,
    prompts: Sequence[Prompt],
    count: int,
    *,
    is_over: Callable[[], bool],
    share_of_long: float = 0.0,
    leaves_within_s: float = LEAVES_WITHIN_S,
) -> Iterator[Request]:
    """Yields at least `count` requests, and more until `is_over`. A long answer has all tokens of
    its reference."""
    for number in itertools.takewhile(lambda n: n < count or not is_over(), itertools.count()):
        leaves = rng.random() < SHARE_OF_LEAVERS
        prompt = rng.choice(prompts)
        is_long = rng.random() < share_of_long
        yield Request(
            number,
            prompt,
            len(prompt.expected) if is_long else rng.randint(1, MAX_TOKENS),
            "http" if number % 2 else "grpc",
            rng.uniform(0, leaves_within_s) if leaves else None,
        )


class Load:
    """Sends all requests, `num_clients` at a time. `outcomes` is filled as they end."""

    def __init__(
        self,
        cluster: Served,
        wanted: Iterator[Request],
        *,
        num_clients: int,
        bound_s: float,
        router: RouterLife | None = None,
    ) -> None:
        """`router` is for a test that kills it: the router's request records are lost then, so it
        is unknown which requests it had read before."""
        self._router = router
        self._cluster = cluster
        self._wanted = wanted
        self._num_clients = num_clients
        self._bound_s = bound_s
        self.outcomes: list[Outcome] = []
        self.num_running = 0
        # requests that the router did not know yet, and its number of deaths then
        self._unheard: list[tuple[Outcome, int]] = []

    async def run(self) -> None:
        target = f"127.0.0.1:{self._cluster.grpc_port}"
        async with open_client(self._cluster) as http, grpc.aio.insecure_channel(target) as channel:
            apis: dict[str, HttpApi | GrpcApi] = {
                "http": HttpApi(http),
                "grpc": GrpcApi(InferenceStub(channel)),
            }
            clients = (self._client(apis) for _ in range(self._num_clients))
            await asyncio.gather(*clients)
            # On a busy machine, a router may read a request long after its client has left.
            for left, num_deaths in self._unheard:
                await self._note_heard(apis[left.request.api], left, num_deaths)

    async def _client(self, apis: Mapping[str, HttpApi | GrpcApi]) -> None:
        # a request that got no token; the router is queried for it after the next one ended
        left: Outcome | None = None
        num_deaths = 0  # number of router deaths when it disconnected
        for request in self._wanted:
            outcome = await self._outcome(apis[request.api], Outcome(request))
            if self._router is not None and outcome.cut_short == "router lost":
                await self._outcome(apis[request.api], Outcome(request, is_retry=True))
                self._router.num_retries -= 1
            if left is not None:
                await self._note_heard(apis[left.request.api], left, num_deaths)
                if not left.was_heard:
                    self._unheard.append((left, num_deaths))
            left = outcome if outcome.cut_short == "left" and not outcome.token_ids else None
            num_deaths = self._num_deaths
        if left is not None:
            await self._note_heard(apis[left.request.api], left, num_deaths)

    async def _note_heard(self, api: HttpApi | GrpcApi, left: Outcome, num_deaths: int) -> None:
        """Records whether the router read a request, unless the router died since then."""
        if num_deaths != self._num_deaths:
            return
        try:
            left.was_heard = await api.was_heard(left.name)
        except (httpx.TransportError, grpc.aio.AioRpcError):
            if self._router is None:
                raise

    @property
    def _num_deaths(self) -> int:
        return self._router.num_deaths if self._router is not None else 0

    async def _outcome(self, api: HttpApi | GrpcApi, outcome: Outcome) -> Outcome:
        router = self._router or RouterLife()
        await router.is_up.wait()
        num_deaths = router.num_deaths
        self.num_running += 1
        try:
            await self._ask(api, outcome)
        finally:
            self.num_running -= 1
            self.outcomes.append(outcome)
        was_cut = outcome.kind not in ("finished", "left", "hung")
        if was_cut and router.num_deaths > num_deaths and not outcome.is_retry:
            outcome.cut_short = "router lost"
            router.num_retries += 1
        return outcome

    async def _ask(self, api: HttpApi | GrpcApi, outcome: Outcome) -> None:
        started = time.monotonic()
        leaves_after_s = outcome.request.leaves_after_s
        try:
            async with asyncio.timeout(self._bound_s if leaves_after_s is None else leaves_after_s):
                await api.ask(outcome)
        except TimeoutError:
            outcome.cut_short = "hung" if leaves_after_s is None else "left"
        except (httpx.TransportError, grpc.aio.UsageError) as error:
            outcome.ends.append(repr(error))
        outcome.seconds = time.monotonic() - started


class HttpApi:
    """`/v1/completions` of the router."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ask(self, outcome: Outcome) -> None:
        request = outcome.request
        body = {
            "prompt": request.prompt.token_ids,
            "max_tokens": request.max_tokens,
            **request.prompt.sampling,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        named = {REQUEST_ID_HEADER: outcome.name}
        async with self._client.stream(
            "POST", "/v1/completions", json=body, headers=named
        ) as response:
            if response.status_code != 200:
                outcome.ends.append(json.loads(await response.aread())["error"]["code"])
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    _note_event(json.loads(line.removeprefix("data: ")), outcome)

    async def was_heard(self, name: str) -> bool:
        """Returns whether the router keeps a record of the request that its client called so."""
        return (await self._client.get(f"/v1/requests/{name}")).status_code == 200


def _note_event(event: dict, outcome: Outcome) -> None:
    if "error" in event:
        outcome.ends.append(event["error"]["code"])
    if usage := event.get("usage"):
        outcome.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    for choice in event.get("choices", ()):
        outcome.token_ids.extend(choice.get("token_ids") or ())
        if choice.get("finish_reason"):
            outcome.ends.append(choice["finish_reason"])


class GrpcApi:
    """`Generate` of the router's gRPC replica."""

    def __init__(self, stub: InferenceStub) -> None:
        self._stub = stub

    async def ask(self, outcome: Outcome) -> None:
        request = outcome.request
        call = self._stub.Generate(
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=request.prompt.token_ids),
                sampling=pb.SamplingParams(**request.prompt.sampling),
                max_tokens=request.max_tokens,
                ignore_eos=True,
            ),
            metadata=((REQUEST_ID_HEADER, outcome.name),),
            # The channel connects a moment after a killed replica has returned.
            wait_for_ready=True,
        )
        try:
            async for message in call:
                outcome.token_ids.extend(message.token_ids)
                outcome.cached_tokens = message.usage.cached_tokens
                if message.finish_reason:
                    outcome.ends.append(message.finish_reason)
        except grpc.aio.AioRpcError as error:
            codes = dict(error.trailing_metadata() or ())
            outcome.ends.append(str(codes.get("tandem-code", error.code().name)))
        finally:
            call.cancel()

    async def was_heard(self, name: str) -> bool:
        """Returns whether the replica keeps a record of the request that its client called so."""
        try:
            await self._stub.GetRequest(pb.GetRequestRequest(request_id=name), timeout=20)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                return False
            raise
        return True
