"""Defines deltas, the increments of an answer that the HTTP and gRPC APIs send to clients."""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import asdict

from tandem.common.cached_tokens import CachedTokens
from tandem.errors import Incompatible
from tandem.net.rpc.tandem.v1.worker_pb2 import LogprobEntry
from tandem.router.metrics.timeline import Timeline
from tandem.router.parsers.machine import CallDelta
from tandem.router.request.job import Routed


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0  # included in completion_tokens
    # How many of cached_tokens came from each tier. None: the workers that served the request have
    # no tiers besides the KV pool.
    cached_by_tier: CachedTokens | None = None
    storable_tokens: int = 0  # number of prompt tokens in full KV blocks; only these can be cached
    # True: the request moved to a new worker, which had to choose again which tokens' KV is kept
    # within the request's KV budget (docs/kv_budgets.md).
    is_budget_restarted: bool = False

    @property
    def cached_details(self) -> dict[str, Any]:
        """The counts of cached tokens, named as in OpenAI's APIs."""
        details: dict[str, Any] = {"cached_tokens": self.cached_tokens}
        if self.cached_by_tier is not None:
            details["cached_tokens_by_tier"] = asdict(self.cached_by_tier)
        return details

    @property
    def marks(self) -> dict[str, Any]:
        """Usage fields that an answer of any API contains only if they are true."""
        return {"budget_restarted": True} if self.is_budget_restarted else {}

    def __add__(self, other: "Usage") -> "Usage":
        parts = [u.cached_by_tier for u in (self, other) if u.cached_by_tier is not None]
        cached = self.cached_tokens + other.cached_tokens
        unreported = cached - sum(part.total for part in parts)
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            cached,
            self.reasoning_tokens + other.reasoning_tokens,
            sum(parts, CachedTokens(device=unreported)) if parts else None,
            self.storable_tokens + other.storable_tokens,
            self.is_budget_restarted or other.is_budget_restarted,
        )


@dataclass(frozen=True, slots=True)
class Delta:
    """The new text and tokens of one choice since the choice's previous delta.

    The first delta of a choice has the choice's first token and the prompt's token ids. The last
    delta of a choice has a `finish_reason`. `usage` counts the prompt and the choice's tokens so
    far.
    """

    text: str
    token_ids: list[int]
    usage: Usage
    finish_reason: str = ""  # "stop", "length" or "tool_calls"
    prompt_token_ids: list[int] | None = None
    # The client's stop string or stop token id that ended the choice. None: neither ended it.
    stop_reason: str | int | None = None
    # Log probabilities, one entry for each token in token_ids; empty if not requested.
    logprobs: list[LogprobEntry] = field(default_factory=list)
    # In the first delta, if requested: log probabilities of the prompt's tokens after the first.
    prompt_logprobs: list[LogprobEntry] = field(default_factory=list)
    # In the first delta, if requested: the hidden state of the prompt's last token.
    embedding: list[float] = field(default_factory=list)
    routed: Routed | None = None  # the workers that run the choice, and why they were chosen
    timeline: Timeline | None = None  # the request's stages, such as queue and prefill, so far
    limit_headers: Mapping[str, str] = field(default_factory=dict)  # headers `x-ratelimit-*`
    reasoning: str = ""  # new reasoning text, which precedes the content in `text`
    tool_calls: tuple[CallDelta, ...] = ()
    index: int = 0  # index of the choice among the choices of the request
    # In the last delta of the request: usage of all completions, with the prompt counted once.
    total: Usage | None = None


def normalized(state: Sequence[float]) -> "array[float]":
    """Returns a hidden state scaled to Euclidean length 1.

    Raises Incompatible if the state is empty. A worker without support for embeddings sends an
    empty state.
    """
    if not state:
        raise Incompatible(
            "the worker does not support embeddings, because its version is too old; update the "
            "workers"
        )
    length = math.sqrt(math.fsum(value * value for value in state)) or 1.0
    return array("f", [value / length for value in state])
