"""Creates the transfer thread of a process that has a KV pool: the engine process or a rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from msgspec.structs import replace

from tandem.common.config.transfer import TransferConfig
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.executor.ranks.messages import RankPipe
from tandem.engine.executor.runner import ModelRunner
from tandem.transfer.cuda_ipc.agent import IpcDevice
from tandem.transfer.ranks import serve
from tandem.transfer.reads.messages import LocalPool, TransferEvent
from tandem.transfer.thread import TransferThread


class PoolTransfers:
    """Creates the transfer thread of this process's KV pool, which may be on a CUDA device."""

    def __init__(
        self, kv: torch.Tensor, layout: KvLayout, *, rank: int = 0, num_ranks: int = 1
    ) -> None:
        """`kv` is the memory of the pool, and `layout` that of blocks with all heads. If each of
        `num_ranks` ranks has a pool of its own, the pool has the heads of `rank`."""
        self._device = kv.device
        is_cuda = kv.device.type == "cuda"
        pool = LocalPool(
            address=kv.data_ptr(),
            num_bytes=layout.of_rank(num_ranks).pool_bytes,
            device_id=kv.device.index or 0,
            memory="VRAM" if is_cuda else "DRAM",
            layout=layout,
            rank=rank,
            num_ranks=num_ranks,
        )
        if is_cuda:
            # kept in an attribute, so that torch does not reuse the memory
            self._scratch = torch.empty(pool.scratch_bytes, dtype=torch.uint8, device=kv.device)
            pool = replace(pool, device_scratch=self._scratch.data_ptr())
        self.pool = pool

    def thread(
        self, config: TransferConfig, agent_name: str, on_event: Callable[[TransferEvent], None]
    ) -> TransferThread:
        """Returns a new transfer thread (`TransferThread`). `agent_name` is the worker's."""
        if self.pool.num_ranks > 1:
            agent_name = f"{agent_name}-rank-{self.pool.rank}"
        return TransferThread(
            self.pool,
            config,
            agent_name,
            on_event,
            self.use_device,
            self.finish_copies,
            self.ipc_device(),
        )

    def use_device(self) -> None:
        """Sets the pool's CUDA device in the transfer thread.

        UCX opens a peer's memory in the CUDA context of that device.
        """
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def finish_copies(self) -> None:
        """Waits until the pool's CUDA device has finished all work that this process has queued.

        UCX copies in streams of its own, which are gone when its agent is destroyed. So this waits
        for the whole device, and for the step in progress, too. No graph is being recorded then:
        the runner records all graphs before the transfer thread starts.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def ipc_device(self) -> IpcDevice | None:
        """Returns the pool's device if processes of this machine can map its memory."""
        if self._device.type != "cuda":
            return None
        from tandem.transfer.cuda_ipc.cuda import CudaIpcDevice  # imports Triton

        return CudaIpcDevice(self._device)


def serve_rank(
    config: TransferConfig, agent_name: str, runner: ModelRunner, pipe: RankPipe
) -> None:
    """Runs the transfer thread of ranks 1 and up, which rank 0 drives through the pipe. Runs in a
    thread of the rank's process (`RankService`)."""
    pool = PoolTransfers(
        runner.kv, runner.whole_layout, rank=runner.rank, num_ranks=runner.num_pools
    )
    serve(pipe, partial(pool.thread, config, agent_name))
