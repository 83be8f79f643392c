"""Embeddings over real gRPC, from an encode worker's service to a worker with KV.

The engine of the worker with KV is scripted: the link notes the commands that it would get.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.engine import EngineConfig
from tandem.common.config.transfer import TransferConfig
from tandem.common.config.worker import WorkerConfig
from tandem.common.prompt_image import PromptImage
from tandem.errors import BadRequest
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerServicer
from tandem.net.store.registry import KvCompatibility, WorkerRecord
from tandem.worker import encoders as encoders_module
from tandem.worker.encode import service as service_module
from tandem.worker.encode.service import EncodeService
from tandem.worker.encoders import Encoders
from tandem.worker.engine_process import messages
from tandem.worker.engine_process.requested_images import RequestedImages
from tandem.worker.lifecycle.listening import listen
from tests.harness.waiting import eventually

pytestmark = pytest.mark.service

HIDDEN, NUM_ROWS = 96, 5000  # 1.9 MB, so several pieces
CONFIG = WorkerConfig(
    role="encode",
    cluster=ClusterConfig(cluster_id="c", redis_url="redis://localhost", token="t"),
    engine=EngineConfig(model="m"),
    transfer=TransferConfig(encode_deadline_s=20.0),
    worker_id="w",
)


class Servicer(WorkerServicer):
    """Sends what an encode worker's service sends, changed by `change`."""

    def __init__(self, service: EncodeService) -> None:
        self.service = service
        self.change: dict[str, Any] = {}
        self.pieces: list[int] = []

    async def Encode(  # noqa: N802
        self, request: pb.EncodeRequest, context: Any
    ) -> AsyncIterator[pb.EncodedImage]:
        async for piece in self.service.serve(request, context):
            for name, value in self.change.items():
                if piece.num_rows or name == "data":
                    setattr(piece, name, value)
            self.pieces.append(len(piece.data))
            yield piece


@dataclass
class Link:
    """Stands in for the link to an engine process, whose part `RequestedImages` does."""

    engine: RequestedImages
    sent: list[messages.Command] = field(default_factory=list)

    def send(self, command: messages.Command, data: memoryview | None = None) -> None:
        self.sent.append(command)
        match command:
            case messages.EncodePool(is_up):
                self.engine.has_encoders = is_up
            case messages.ImageEncoded():
                self.engine.take(command, [b"", b"" if data is None else bytes(data)])


@dataclass
class Pair:
    """An encode worker and a worker with KV."""

    servicer: Servicer
    encoders: Encoders
    engine: RequestedImages
    link: Link
    address: str
    outcomes: Counter[str]
    computed: list[PromptImage]
    may_compute: threading.Event

    def update(self, state: str = "ready", fingerprint: str = "m") -> None:
        record = WorkerRecord(
            worker_id="e0",
            epoch="e",
            role="encode",
            state=state,  # type: ignore[arg-type]
            address=self.address,
            metrics_address="",
            host="",
            pid=1,
            model="",
            max_model_len=0,
            compatibility=KvCompatibility(fingerprint, "", "", 0, "", "", 1),
        )
        self.encoders.update([record])

    async def fetch(self, image: PromptImage, salt: bytes = b"") -> torch.Tensor:
        future = self.engine.fetch(image, salt)
        assert future is not None
        return await asyncio.wrap_future(future)


def rows_of(image: PromptImage) -> torch.Tensor:
    seed = image.digest[0]
    return torch.randn(image.num_rows, HIDDEN, generator=torch.Generator().manual_seed(seed))


def make_image(number: int) -> PromptImage:
    return PromptImage(bytes([number]) * 16, b"file", [0], NUM_ROWS)


@asynccontextmanager
async def paired(config: WorkerConfig = CONFIG, fingerprint: str = "m") -> AsyncIterator[Pair]:
    computed: list[PromptImage] = []
    may_compute = threading.Event()
    may_compute.set()

    def encode(image: PromptImage) -> torch.Tensor:
        computed.append(image)
        may_compute.wait(20)
        if image.data == b"bad":
            raise BadRequest("an image cannot be decoded")
        return rows_of(image)

    service = EncodeService(encode, fingerprint, on_computed=lambda seconds: None)
    servicer = Servicer(service)
    server, address = listen(config, servicer)
    await server.start()
    outcomes: Counter[str] = Counter()
    encoders: Encoders

    def count(outcome: str) -> None:
        outcomes[outcome] += 1

    def send(wanted: messages.ImageWanted) -> None:
        encoders.on_wanted(wanted)

    engine = RequestedImages(send)
    engine.hidden_size = HIDDEN
    link = Link(engine)
    encoders = Encoders(config, link, "m", count)  # type: ignore[arg-type]
    try:
        yield Pair(servicer, encoders, engine, link, address, outcomes, computed, may_compute)
    finally:
        may_compute.set()
        await encoders.aclose()
        await server.stop(None)
        service.close()


async def test_embeddings_come_in_pieces_and_are_kept_by_salt() -> None:
    async with paired() as pair:
        assert pair.engine.fetch(make_image(1), b"") is None, "no encode worker is known"
        pair.update()
        image = make_image(1)
        assert torch.equal(await pair.fetch(image), rows_of(image))
        assert pair.servicer.pieces[0] == 0
        assert len(pair.servicer.pieces) == 3
        assert max(pair.servicer.pieces) <= 1 << 20
        assert torch.equal(await pair.fetch(image), rows_of(image))
        assert len(pair.computed) == 1
        await pair.fetch(image, b"another tenant")
        assert len(pair.computed) == 2
        assert pair.outcomes == {"encoded": 3}
        pair.update("draining")
        assert pair.link.sent[-1] == messages.EncodePool(False)
        assert pair.engine.fetch(image, b"") is None


async def test_requests_for_one_image_wait_for_it_together() -> None:
    async with paired() as pair:
        pair.update()
        pair.may_compute.clear()
        asked = [asyncio.create_task(pair.fetch(make_image(1))) for _ in range(3)]
        await eventually(lambda: pair.servicer.service.num_open == 3)
        pair.may_compute.set()
        await asyncio.gather(*asked)
        assert len(pair.computed) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_fingerprint", "other"),
        ("digest", b"x" * 16),
        ("num_rows", NUM_ROWS - 1),
        ("hidden_size", HIDDEN + 1),
        ("dtype", "bfloat16"),
        ("data", b"short"),
        ("data", bytes(4 << 20)),
    ],
)
async def test_an_embedding_of_another_kind_is_not_used(name: str, value: Any) -> None:
    async with paired() as pair:
        pair.update()
        pair.servicer.change = {name: value}
        with pytest.raises(Exception, match=name if name != "data" else "bytes; the embedding"):
            await pair.fetch(make_image(1))
        assert pair.outcomes == {"wrong": 1}
        pair.servicer.change = {}
        await pair.fetch(make_image(1))


async def test_another_checkpoint_is_refused_on_both_sides() -> None:
    async with paired(fingerprint="other") as pair:
        pair.update(fingerprint="other")
        assert pair.engine.fetch(make_image(1), b"") is None
        pair.update(fingerprint="m")  # as if the record were wrong
        with pytest.raises(Exception, match="checkpoints differ"):
            await pair.fetch(make_image(1))
        assert pair.outcomes == {"wrong": 1}


async def test_errors_of_an_image_are_answered() -> None:
    async with paired() as pair:
        pair.update()
        image = PromptImage(b"b" * 16, b"bad", [0], NUM_ROWS)
        with pytest.raises(Exception, match="cannot be decoded"):
            await pair.fetch(image)
        assert pair.outcomes == {"wrong": 1}
        assert not pair.servicer.service.num_images


async def test_a_late_encode_worker_gets_no_request_for_a_while() -> None:
    config = replace(CONFIG, transfer=replace(CONFIG.transfer, encode_deadline_s=0.3))
    async with paired(config) as pair:
        pair.update()
        pair.may_compute.clear()
        with pytest.raises(Exception, match=r"has not sent it after 0.3 s"):
            await pair.fetch(make_image(1))
        with pytest.raises(Exception, match="no encode worker answers"):
            await pair.fetch(make_image(2))
        assert pair.outcomes == {"late": 1, "lost": 1}
        assert len(pair.computed) == 1


async def test_a_queued_image_is_not_computed_for_requests_that_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise later requests would wait for it, until they leave, too."""
    monkeypatch.setattr(encoders_module, "_RETRY_S", 0.0)
    async with paired() as pair:
        pair.update()
        pair.may_compute.clear()
        left = [asyncio.create_task(pair.fetch(make_image(number))) for number in range(4)]
        await eventually(lambda: pair.servicer.service.num_images == 4)
        for task in pair.encoders._tasks:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await eventually(lambda: pair.servicer.service.num_images == 1)
        again = [asyncio.create_task(pair.fetch(make_image(number))) for number in range(4)]
        await eventually(lambda: pair.servicer.service.num_images == 4)
        pair.may_compute.set()
        await asyncio.gather(*again)
        assert len(pair.computed) == 4


async def test_a_full_queue_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "QUEUE_MAX", 1)
    async with paired() as pair:
        pair.update()
        pair.may_compute.clear()
        first = asyncio.create_task(pair.fetch(make_image(1)))
        await eventually(lambda: pair.servicer.service.num_images == 1)
        with pytest.raises(Exception, match="images wait already"):
            await pair.fetch(make_image(2))
        pair.may_compute.set()
        await first
        assert pair.outcomes == {"busy": 1, "encoded": 1}


async def test_records_that_are_read_while_a_worker_ends_change_nothing() -> None:
    async with paired() as pair:
        pair.update()
        closing = asyncio.create_task(pair.encoders.aclose())
        await asyncio.sleep(0)
        pair.update("draining")  # as the refresh of a record that runs beside the end
        await closing
        pair.update()
        assert not pair.encoders.num_workers


_HANGS = """
import asyncio, threading
from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.engine import EngineConfig
from tandem.common.config.worker import WorkerConfig
from tandem.common.prompt_image import PromptImage
from tandem.errors import WorkerLost
from tandem.worker.encode import worker
from types import SimpleNamespace

class Worker(worker.EncodeWorker):
    def _load(self):
        tower = SimpleNamespace(encode=lambda image: threading.Event().wait())
        return SimpleNamespace(fingerprint="m"), tower

    async def _serve(self):
        image = PromptImage(b"1" * 16, b"file", [0], 1)
        self.service._queue((b"", image.digest), image)
        while not self.service.computing_s:
            await asyncio.sleep(0.01)
        raise WorkerLost("an image was not computed in time")

async def main():
    cluster = ClusterConfig(cluster_id="c", redis_url="redis://localhost:1", token="t")
    config = WorkerConfig(
        role="encode", cluster=cluster, engine=EngineConfig(model="m"), worker_id="w"
    )
    await Worker(config, None).run()

worker._EXIT_S = 0.5
asyncio.run(main())
"""


def test_a_process_ends_although_its_image_hangs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HANGS], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 1
    assert "an image was not computed in time" in done.stderr
    assert "Timeout (0:00:00.500000)!" in done.stderr
