"""One request on its decode worker, and what is known of it so far."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from services.engine.types import Reserved, SequenceSpec
from services.rpc.tandem.v1 import worker_pb2 as pb
from services.worker.prefix_choice import PrefixPlan
from services.worker.router_stream import RouterStream


@dataclass(slots=True)
class DecodeSequence:
    """Times are `time.monotonic()` seconds; 0: not yet."""

    request_id: str
    attempt: int
    spec: SequenceSpec
    candidates: list[pb.PrefillCandidate]
    holders: list[pb.PrefixHolder]  # of the prompt's first blocks, other workers
    stream: RouterStream
    submitted_at: float = field(default_factory=time.monotonic)
    reserved_at: float = 0.0
    first_token_at: float = 0.0
    second_token_at: float = 0.0
    num_sent: int = 0
    cached_tokens: int = 0
    timings: pb.SequenceTimings = field(
        default_factory=lambda: pb.SequenceTimings(transport="local")
    )
    reserved: asyncio.Future[Reserved] | None = None
    prefilling: asyncio.Task[None] | None = None
    may_ask: bool = True  # False: what it lacks is computed here
    asks: asyncio.Timeout | None = None  # while a prefill worker computes its prompt: its end
    prefix: PrefixPlan | None = None  # HERE: whom to pull its first blocks from

    @property
    def sequence_id(self) -> str:
        return self.spec.sequence_id
