"""A router's admin listener with simulated workers, to view the operators' page at any cluster
size.

`python -m tests.harness.page_server --workers 1000 --port 8092` serves only the page, without Redis
or a model. Half of the workers prefill and half decode. Each second their loads change, a few
requests end, blocks are transferred, and one worker is lost for a while.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tandem.api.admin.app import make_admin_app
from tandem.api.admin.page_feed import PageFeed
from tandem.api.http.server import HttpServer, bind
from tandem.api.served_model import ServedModel
from tandem.common.config.admin import AdminOptions
from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.router import RouterConfig
from tandem.common.kv_tiers import KV_TIERS
from tandem.common.worker_load import TierUse
from tandem.net.security.access import Access
from tandem.net.security.audit_trail import AuditTrail
from tandem.net.security.key_ring import KeyRing
from tandem.net.store.client import connect
from tandem.net.store.registry import KvCompatibility, WorkerLoad, WorkerRecord
from tandem.router.metrics.router import Metrics
from tandem.router.metrics.timeline import Timeline
from tandem.router.request.dispatcher import Dispatcher
from tandem.router.request.generator import Generator
from tandem.router.request.log import RequestRecord
from tandem.router.scaling.control import ClusterControl
from tandem.router.workers.cluster_view import ClusterView
from tandem.router.workers.known_worker import KnownWorker

_KV = KvCompatibility("m", "float32", "invariant", 16, "float32", "l", 1)
_UP = SimpleNamespace(
    is_up=True,
    why_down="",
    load=None,
    num_inflight=0,
    unreported=(),
    is_draining=False,
)
_STAGES: dict[Any, float] = {"tokenize": 1, "route": 2, "queue": 20, "prefill": 80, "wire": 3}


class SimulatedRouter:
    """The parts of a router that the page reads, with a view whose workers tests set."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        cluster = ClusterConfig("c", f"unix://{folder}/no-redis", "a-token-for-tests")
        admin = AdminOptions(port=port, grpc_port=0)
        self.config = RouterConfig(
            cluster=cluster, model="m", served_model_name="tiny", admin=admin
        )
        redis = connect(cluster.redis_url)
        self.view = ClusterView(cluster, redis)
        self.view.model_fingerprint = "m"
        self.view.redis_state = "ok"
        self.metrics = Metrics()

        async def match(hashes: list[bytes]) -> dict[str, int]:
            return {}

        def ended(job: object) -> None: ...

        self.dispatcher = dispatcher = Dispatcher(
            self.config, self.view, match, self.metrics, ended, lambda: False
        )
        unused: Any = None
        self.generator = Generator(self.config, self.view, dispatcher, self.metrics, unused)
        self.generator.not_ready_reason = lambda: ""  # type: ignore[method-assign]
        self.trail = AuditTrail(redis, "c", router_id="router-0")
        self.control = ClusterControl(self.config, self.view, self.trail)
        self.access = Access(KeyRing(age_max_s=0), is_loopback=True)
        self.feed = PageFeed(
            self.config, self.generator, self.control, self.metrics, self.trail, self.access
        )

    def put(self, worker_id: str, *tiers: TierUse, num_ranks: int = 1, **load: int) -> None:
        """Adds a worker or changes its load. The id begins with its role."""
        record = WorkerRecord(
            worker_id=worker_id,
            epoch="e",
            role=worker_id.partition("-")[0],
            state="ready",
            address="10.0.0.1:5000",
            metrics_address="",
            host="h",
            pid=1,
            model="m",
            max_model_len=100,
            compatibility=_KV,
            load=WorkerLoad(blocks_total=100, **load),
            tiers=tiers,
            num_ranks=num_ranks,
        )
        client: Any = _UP if record.role == "decode" else None
        self.view._workers[worker_id] = KnownWorker(record, client)

    def remove(self, worker_id: str) -> None:
        """Removes a worker, like one whose record has expired."""
        self.view._note_gone(self.view._workers.pop(worker_id).record)

    async def serve(self) -> None:
        """Serves the admin API until it is cancelled."""
        access = self.access
        unused: Any = None
        app = make_admin_app(
            self.config,
            [
                ServedModel(
                    self.config,
                    self.view,
                    self.metrics,
                    self.dispatcher,
                    self.generator,
                    unused,
                    self.control,
                    unused,
                )
            ],
            {"": self.feed},
            access,
            unused,
            self.trail,
        )
        sock = bind("127.0.0.1", self.config.admin.port, port_option="--port", send_deadline_s=60)
        server = HttpServer(app, self.config, access.clients)
        await asyncio.gather(server.serve(sockets=[sock]), self.feed.run())

    def end_request(self, request_id: str, prefill: str, decode: str) -> None:
        """Ends a request that these workers prefilled and decoded."""
        timeline = Timeline()
        timeline.stages_s = {n: ms / 1000 * random.uniform(0.5, 2) for n, ms in _STAGES.items()}
        timeline.ttft_s = sum(timeline.stages_s.values())
        record = RequestRecord(request_id, "chat", timeline, outcome="stop", num_sent=50)
        self.generator.requests.open(record)
        self.metrics.requests_running.inc()
        record.end()
        record.facts |= {"prefill_worker": prefill, "decode_worker": decode, "transport": "nixl"}
        record.facts |= {"placement": "load: simulated", "blocks_pulled": 8, "bytes_pulled": 10**6}
        record.facts |= {"placement_sentence": "The load decided: this request is simulated."}
        record.facts["usage"] = {
            "prompt_tokens": 128,
            "cached_tokens": 64,
            "completion_tokens": 50,
        }
        self.metrics.on_end(record)
        self.metrics.on_first_token(timeline.ttft_s, 2.0)
        self.metrics.on_next_tokens(0.02, 0.1, 49)
        self.metrics.generation_tokens.inc(50)
        self.metrics.flows.note_pull(prefill, decode, 8)


async def simulate(router: SimulatedRouter, num_workers: int, requests_per_s: int) -> None:
    """Changes every worker's load each second."""
    ids = [f"{role}-{n}" for n in range(num_workers // 2) for role in ("prefill", "decode")]
    second = 0
    while True:
        second += 1
        for worker_id in ids:
            router.put(
                worker_id,
                *(TierUse(tier.name, 1000, 20 * second % 1000) for tier in KV_TIERS),
                num_running=random.randrange(32),
                num_waiting=random.randrange(4),
                num_leases=random.randrange(8),
                blocks_used=random.randrange(100),
                blocks_cached=random.randrange(100),
            )
        if second % 10 == 5:
            router.remove(ids[second % num_workers])
            for n in range(8):
                router.metrics.flows.note_move(
                    ids[second % num_workers], lambda n=n: ids[2 * n + 1]
                )
        for n in range(requests_per_s):
            prefill, decode = random.choice(ids[::2]), random.choice(ids[1::2])
            router.end_request(f"{second:08x}{n:08x}", prefill, decode)
        await asyncio.sleep(1)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=20, help="that end in a second")
    parser.add_argument("--port", type=int, default=8092)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    options = parser.parse_args()
    router = SimulatedRouter(options.folder, options.port)
    working = asyncio.create_task(simulate(router, options.workers, options.requests))
    try:
        await router.serve()
    finally:
        working.cancel()
        print(f"CPU {time.process_time():.1f} s")


if __name__ == "__main__":
    asyncio.run(main())
