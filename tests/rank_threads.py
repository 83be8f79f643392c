"""Ranks of torch kernels as threads of one process, each with a KV pool of its own.

Processes of real ranks take seconds to start. These ranks divide weights, pools and activations in
the same way, and exchange tensors through a list.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from tandem.engine.cache.layout.kv_groups import KvLayout, model_layout
from tandem.engine.cache.layout.row_layout import RowLayout
from tandem.engine.cache.layout.state_layout import StateLayout
from tandem.engine.executor.torch.steps import TorchSteps
from tandem.engine.executor.weights.load import load_weights
from tandem.engine.executor.weights.share import Share
from tandem.engine.scheduler.batch import StepBatch
from tandem.models.folder import ModelFolder
from tandem_kernels.kv_cache import make_pool
from tandem_kernels.row_pool import RowPool
from tandem_kernels.state_pool import Pool, StatePool

_TIMEOUT_S = 60.0
T = TypeVar("T")


class _Exchange:
    """Where the threads of all ranks meet."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=_TIMEOUT_S)
        self.places: list[torch.Tensor] = [torch.empty(0)] * num_ranks


class ThreadCollectives:
    """The collectives of one rank."""

    is_recordable = False

    def __init__(self, share: Share, exchange: _Exchange) -> None:
        self.share = share
        self._exchange = exchange

    def gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        assert x.shape[1] == len(self.share.of(width))
        return torch.cat(self._all(x), 1)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([each.float() for each in self._all(x)]).sum(0).to(x.dtype)

    def broadcast(self, x: torch.Tensor) -> None:
        x.copy_(self._all(x)[0])

    def break_up(self) -> None:
        self._exchange.barrier.abort()

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._exchange.places[self.share.rank] = x.clone()
        self._exchange.barrier.wait()
        found = list(self._exchange.places)
        self._exchange.barrier.wait()
        return found


class RankThreads:
    """The ranks of one model, in float32 on the CPU. One rank computes as no ranks do."""

    def __init__(
        self,
        folder: ModelFolder,
        num_ranks: int,
        *,
        numerics: str,
        num_blocks: int,
        block_size: int = 8,
    ) -> None:
        config = folder.config
        self._exchange = _Exchange(num_ranks)
        one = model_layout(config, block_size=block_size, dtype="float32")
        sizes = [num_blocks] * len(one.groups)
        self.layout = model_layout(config, sizes, block_size=block_size, dtype="float32")
        self.pools: list[list[Pool]] = []
        self.steps: list[TorchSteps] = []
        for rank in range(num_ranks):
            share = Share(rank, num_ranks, splits_inputs=numerics == "fast")
            weights = load_weights(
                folder.weight_files,
                config,
                dtype=torch.float32,
                device=torch.device("cpu"),
                share=share,
            )
            more = [ThreadCollectives(share, self._exchange)] if num_ranks > 1 else []
            self.steps.append(TorchSteps(config, weights, numerics, *more))
            self.pools.append(_pools(self.layout.of_rank(num_ranks)))

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Computes a step on all ranks. Returns the logits of the first one."""
        logits = self.each(lambda rank: self.steps[rank].forward(batch, self.pools[rank]).clone())
        return logits[0]

    def each(self, call: Callable[[int], T]) -> list[T]:
        """Calls a function with each rank's number, in a thread for each."""

        def called(rank: int) -> T:
            try:
                return call(rank)
            except BaseException:
                self._exchange.barrier.abort()
                raise

        with ThreadPoolExecutor(len(self.steps)) as threads:
            return list(threads.map(called, range(len(self.steps))))

    def states(self) -> list[torch.Tensor]:
        """Returns the bytes of the pool of each state group, with the heads of all ranks."""
        return [
            torch.cat([pools[number].memory for pools in self.pools], 1)
            for number in self.layout.state_groups
        ]


def _pools(layout: KvLayout) -> list[Pool]:
    pools: list[Pool] = []
    for group in layout.groups:
        own = group.layout
        memory = torch.zeros(own.num_blocks, own.block_bytes, dtype=torch.uint8)
        if isinstance(own, StateLayout):
            pools.append(StatePool(memory, own))
        else:
            is_of_rows = isinstance(own, RowLayout)
            pools.append(RowPool(memory, own) if is_of_rows else make_pool(memory, own))
    return pools
