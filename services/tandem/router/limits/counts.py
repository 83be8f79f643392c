"""Counts each tenant's recent requests and tokens in Redis, for limits over all routers.

Redis has one hash for each tenant with limits:

    key      {tandem:CLUSTER}:limits:TENANT; the key expires
    field    one process of a router
    value    [time of the write in ms, running requests, window] in MessagePack; the window is
             [bucket, requests, tokens, bucket, requests, tokens, ...] (a bucket is one second)
Example of a window: [100, 2, 50, 103, 1, 30]. The router admitted 2 requests with 50 tokens in
second 100, and 1 request with 30 tokens in second 103.

Each router writes only its own field, and always the complete value. So after an outage of Redis,
the next write of each router restores the counts. When a router is killed, its running requests
count for LEASE_MS after its last write, and the requests that it admitted count for a minute.

The PyPI package `limits` does not fit: each of its calls checks only one limit, and it cannot give
back unused tokens.
"""

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tandem.net.security.limits import Limits
from tandem.net.store.client import Client
from tandem.net.store.script import Script
from tandem.router.limits.window import BUCKET_MS, NUM_BUCKETS, WINDOW_MS, Kind, Window, window_of

LEASE_MS = 5000

# Decides about each new request in turn, adds the admitted requests to the calling router's window,
# and writes this router's field. Fields of other routers that are old or unreadable are removed.
# KEYS:
#   1     the tenant's hash
# ARGV:
#   1     the field of the calling router
#   2     [running requests, window] of the calling router
#   3...  for each new request four numbers: its limits of requests per minute, tokens per minute
#         and concurrent requests (0: no limit), and its number of tokens
# Returns:
#   1     time of Redis's clock in ms
#   2     1 if the field of the calling router existed, else 0
#   3     running requests of the other routers
#   4     window of the other routers
#   5...  for each new request 0 if it is admitted, else the exceeded limit: 1 requests per minute,
#         2 tokens per minute, 3 concurrent requests
_COUNT = f"""
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local bucket = math.floor(now / {BUCKET_MS})
local others, elsewhere, known, requests, tokens = {{}}, 0, 0, 0, 0
local function sum(window, into)
  for i = 1, #window, 3 do
    if math.abs(window[i] - bucket) < {NUM_BUCKETS} then
      requests, tokens = requests + window[i + 1], tokens + window[i + 2]
      if into then for j = i, i + 2 do into[#into + 1] = window[j] end end
    end
  end
end
local parts = redis.call('HGETALL', KEYS[1])
for i = 1, #parts, 2 do
  if parts[i] == ARGV[1] then
    known = 1
  else
    local is_read = pcall(function()
      local at, running, window = unpack(cmsgpack.unpack(parts[i + 1]))
      if now - at > {WINDOW_MS} then error() end
      sum(window, others)
      if now - at <= {LEASE_MS} then elsewhere = elsewhere + running end
    end)
    if not is_read then redis.call('HDEL', KEYS[1], parts[i]) end
  end
end
local own, window = unpack(cmsgpack.unpack(ARGV[2]))
sum(window)
local answers, admitted, admitted_tokens = {{}}, 0, 0
for i = 3, #ARGV, 4 do
  local rpm, tpm = tonumber(ARGV[i]), tonumber(ARGV[i + 1])
  local most, cost = tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
  local answer = 0
  if rpm > 0 and requests + 1 > rpm then answer = 1
  elseif tpm > 0 and tokens + cost > tpm then answer = 2
  elseif most > 0 and elsewhere + own + 1 > most then answer = 3 end
  if answer == 0 then
    requests, tokens, own = requests + 1, tokens + cost, own + 1
    admitted, admitted_tokens = admitted + 1, admitted_tokens + cost
  end
  answers[#answers + 1] = answer
end
if admitted > 0 then
  for _, n in ipairs({{bucket, admitted, admitted_tokens}}) do window[#window + 1] = n end
end
redis.call('HSET', KEYS[1], ARGV[1], cmsgpack.pack({{now, own, window}}))
redis.call('PEXPIRE', KEYS[1], {WINDOW_MS})
return {{now, known, elsewhere, cmsgpack.pack(others), unpack(answers)}}
"""


_KINDS: Sequence[Kind | None] = (None, "requests", "tokens", "concurrent")


class Reply(NamedTuple):
    """The result of one call of the script `_COUNT`."""

    now_ms: int
    was_known: bool  # True: this router's field existed in Redis before the call
    others: Window  # the tenant's requests and tokens that the other routers admitted
    others_running: int
    refused_by: list[Kind | None]  # for each new request the limit that refuses it; None: admitted


class LimitRequest(NamedTuple):
    """The limits of a new request's API key, and the most tokens that the request may use."""

    limits: Limits
    tokens: int


class TenantCounts:
    """Reads and writes the counts of one cluster's tenants. Errors of redis-py propagate."""

    def __init__(self, redis: Client, cluster_id: str, router_id: str) -> None:
        self._redis = redis
        self._prefix = f"{{tandem:{cluster_id}}}:limits"
        # Each process needs its own field. The random suffix distinguishes a restarted router from
        # the process before the restart, whose requests still count.
        self._process = f"{router_id}/{secrets.token_hex(4)}"
        self._count = Script(_COUNT)

    async def count(
        self, tenant: str, running: int, window: Window, requests: Sequence[LimitRequest]
    ) -> Reply:
        """Writes this router's counts and decides about new requests, in one round trip."""
        numbers = [
            n
            for limits, tokens in requests
            for n in (
                limits.requests_per_minute,
                limits.tokens_per_minute,
                limits.max_concurrent,
                tokens,
            )
        ]
        part = msgspec.msgpack.encode([running, window.flat()])
        key = f"{self._prefix}:{tenant}"
        now_ms, known, elsewhere, others, *answers = await self._count(
            self._redis, [key], self._process, part, *numbers
        )
        found = window_of(msgspec.msgpack.decode(others, type=list[int]))
        return Reply(now_ms, bool(known), found, elsewhere, [_KINDS[a] for a in answers])
