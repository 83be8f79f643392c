"""Makes decode workers keep the KV of completions whose clients will probably continue them.

The KV is kept if the client requested retention, or if the answer has tool calls: then the client
will send the results of the calls in its next request. When such a completion ends, the router
sends a KeepRequest to the decode worker in the background, and the worker pins the blocks for some
time. The worker's reply is recorded in `RequestRecord.kept`. If the worker cannot pin the blocks,
the blocks may be evicted sooner, but the request does not fail.
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

_ASKED_MAX = 256  # largest number of KeepRequests without a reply


class Keeper:
    def __init__(self, view: ClusterView, tool_pin_s: float) -> None:
        """`tool_pin_s` is the shortest pin in seconds after an answer with tool calls.

        With 0, the KV is kept only if the client requested retention.
        """
        self._view = view
        self._tool_pin_s = tool_pin_s
        self._tasks: set[asyncio.Task[None]] = set()

    def on_end(self, job: Job, record: "RequestRecord", waits_for_tools: bool) -> None:
        """Sends a KeepRequest if the KV of an ended completion should be kept.

        `waits_for_tools` is True if the answer has tool calls, so that the KV is kept for at least
        `tool_pin_s` seconds.
        """
        client = job.request.client
        worker = job.worker
        pin_s = client.retention.pin_s
        pinned_tokens = job.request.pinned_tokens
        if waits_for_tools and self._tool_pin_s:
            # After tool calls, the KV of all tokens is pinned. If the client requested a pin of
            # leading tokens only, the worker has already pinned them for the requested time.
            pin_s = self._tool_pin_s if pinned_tokens else max(pin_s, self._tool_pin_s)
            pinned_tokens = 0
        compatibility = self._view.compatibility()
        if not pin_s or worker is None or compatibility is None:
            return
        # The last generated token has no KV, because it was never an input of the model.
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
            record.kept["why_not"] = (
                f"{_ASKED_MAX} other requests already wait for a worker to keep KV"
            )
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
                raise WorkerLost(f"worker {worker_id} is no longer in the cluster")
            reply = await client.keep(message)
        except (WorkerLost, grpc.aio.AioRpcError) as error:
            log.debug(
                "worker %s could not be asked to keep the KV of request %s: %r",
                worker_id,
                record.request_id,
                error,
            )
            record.kept["why_not"] = f"{worker_id} did not answer"
            return
        record.kept["tokens"] = reply.num_blocks * block_size
        record.kept["why_not"] = reply.reason
