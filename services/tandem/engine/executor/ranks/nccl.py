"""Collectives between GPUs, one for each rank, through NCCL."""

from __future__ import annotations

import os
import tempfile
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from tandem.engine.executor.ranks.shared_memory import SharedMemoryCollectives

_PATH_BYTES = 4096


class NcclCollectives:
    """The collectives of one rank. The ranks connect at the first call, and `host` carries the path
    of the file at which they meet. A CUDA graph can record later calls."""

    is_recordable = True

    def __init__(self, host: SharedMemoryCollectives, device: torch.device) -> None:
        self.share = host.share
        self._host = host
        self._device = device

    def gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        parts = self.share.parts(width)
        # NCCL needs equal shapes, and shares may differ by one column.
        widest = max(map(len, parts))
        mine = pad(x, (0, widest - x.shape[1])).contiguous()
        rows = x.new_empty(self.share.num_ranks * len(x), widest)  # of one rank after the other
        dist.all_gather_into_tensor(rows, mine, group=self._group)
        by_rank = rows.view(self.share.num_ranks, len(x), widest)
        return torch.cat([own[:, : len(part)] for part, own in zip(parts, by_rank, strict=True)], 1)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self._group)
        return x

    def broadcast(self, x: torch.Tensor) -> None:
        dist.broadcast(x, src=0, group=self._group)

    def break_up(self) -> None:
        """Ends NCCL's kernels that wait for a rank. The results of the step are then undefined."""
        self._host.break_up()
        if "_group" in self.__dict__:
            self._group.abort()

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        """Connects the ranks."""
        # Ranks are on one machine, so NCCL needs no other network to connect them.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "nccl",
            init_method=self._meeting_point().as_uri(),
            rank=self.share.rank,
            world_size=self.share.num_ranks,
            device_id=self._device,
        )
        group = dist.group.WORLD
        assert group is not None
        return group

    def _meeting_point(self) -> Path:
        """Returns the path of a file that does not exist yet, the same on all ranks."""
        path = b""
        if self.share.rank == 0:
            # Removed when this process ends, because NCCL's threads use the file, too.
            self._folder = tempfile.TemporaryDirectory(prefix="tandem-ranks-")
            path = os.fsencode(self._folder.name)
        own = torch.frombuffer(bytearray(path.ljust(_PATH_BYTES, b"\0")), dtype=torch.uint8)
        paths = self._host.gather(own.unsqueeze(0), _PATH_BYTES * self.share.num_ranks)
        first = bytes(paths[0, :_PATH_BYTES].tolist()).rstrip(b"\0")
        return Path(os.fsdecode(first)) / "store"
