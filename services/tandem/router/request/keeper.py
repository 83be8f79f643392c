"""Sends requests to decode workers to keep the KV of ended requests, and records the replies.

    completion ends --KV is to be kept--> KeepRequest to the decode worker, in the background
                                          --reply--> `RequestRecord.kept`
A worker itself pins the blocks of a request that has a Retention. But the worker does not know that
an answer has tool calls, whose results the client sends in the next request. The KeepRequest covers
this case, too. Blocks that a worker cannot pin are evicted sooner; nothing fails.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc.aio

from tandem.errors import WorkerLost
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.router.request.job import Job
from tandem.router.workers.cluster_view import ClusterView

if TYPE_CHECKING:
    from tandem.router.request.log import RequestRecord

log = logging.getLogger(__name__)

_ASKED_MAX = 256  # simultaneous requests to workers


class Keeper:
    def __init__(self, view: ClusterView, tool_pin_s: float) -> None:
        """`tool_pin_s` is the minimum time for which the KV of an answer with tool calls is kept.

        0 turns that off.
        """
        self._view = view
        self._tool_pin_s = tool_pin_s
        self._tasks: set[asyncio.Task[None]] = set()

    def on_end(self, job: Job, record: "RequestRecord", waits_for_tools: bool) -> None:
        """Requests that the worker keeps a completion's KV, if the client requested retention.

        `waits_for_tools`: the answer has tool calls, so the KV is kept for `tool_pin_s` in any
        case.
        """
        client = job.request.client
        worker = job.worker
        pin_s = client.retention.pin_s
        pinned_tokens = job.request.pinned_tokens
        if waits_for_tools and self._tool_pin_s:
            # After tool calls, the KV of all tokens is kept. If the client requested a pin of only
            # the first tokens, the worker has already pinned these.
            pin_s = self._tool_pin_s if pinned_tokens else max(pin_s, self._tool_pin_s)
            pinned_tokens = 0
        compatibility = self._view.compatibility()
        if not pin_s or worker is None or compatibility is None:
            return
        # The engine has not computed the KV of the last generated token.
        num_tokens = min(job.num_tokens - 1, pinned_tokens or job.num_tokens)
        num_blocks = num_tokens // compatibility.block_size
        message = pb.KeepRequest(
            block_hashes=job.hashes(compatibility)[:num_blocks],
            cache_salt=job.request.cache_salt,
            retention=pb.Retention(returns=True, pin_s=pin_s, weight=client.limits.weight),
        )
        record.kept = {
            "worker": worker.worker_id,
            "seconds": pin_s,
            "tokens": 0,
            "tokens_asked": num_blocks * compatibility.block_size,
            "why_not": "",
        }
        if len(self._tasks) >= _ASKED_MAX:
            record.kept["why_not"] = f"{_ASKED_MAX} others wait for workers' answers"
            return
        asking = self._ask(worker.worker_id, message, record, compatibility.block_size)
        task = asyncio.create_task(asking, name=f"keep-{job.request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(
        self, worker_id: str, message: pb.KeepRequest, record: "RequestRecord", block_size: int
    ) -> None:
        try:
            client = self._view.client(worker_id)
            if client is None:
                raise WorkerLost(f"worker {worker_id} is gone")
            reply = await client.keep(message)
        except (WorkerLost, grpc.aio.AioRpcError) as error:
            log.debug("%s keeps nothing of %s: %r", worker_id, record.request_id, error)
            record.kept["why_not"] = f"{worker_id} did not answer"
            return
        record.kept["tokens"] = reply.num_blocks * block_size
        record.kept["why_not"] = reply.reason
