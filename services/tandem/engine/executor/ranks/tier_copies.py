"""Copies whole blocks between host memory and the pools of several ranks, for the KV tiers.

All ranks map one memory, in which the tiers keep whole blocks: the slots of the tier in host
memory, and the rings of the channels to the other tiers. Each rank copies its own heads:

    block in the memory    | heads of rank 0 | heads of rank 1 | ...
                               ^ copy            ^ copy
    pools                  rank 0's pool     rank 1's pool

So the bytes of a block do not depend on the number of ranks. Of ranks with the same heads
(replicas), one copies to the memory, and all copy to their pools.

Rank 0 sends each copy to all ranks, itself included, through one pipe for each rank. A rank makes
the copies in order, and sends a byte when one is done.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe
from typing import NamedTuple

import torch

from tandem.common.config.engine import EngineConfig
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.cache.layout.rank_heads import RankHeads
from tandem.engine.executor.ranks.messages import RankPipe
from tandem.engine.tiers.device.blocks import DONE, Channel, DeviceBlocks, Event, HostPages
from tandem.engine.tiers.device.cuda import CudaDevice
from tandem.engine.tiers.device.staged_blocks import Copier, StagedChannel, Stream, ring_slots
from tandem.engine.tiers.storage import Bytes

log = logging.getLogger(__name__)

_ALIGNMENT = 4096  # of the slots and rings


class Copy(NamedTuple):
    """A copy of one block, which each rank makes for its heads."""

    group: int
    block_id: int  # the block's id in the pool of `group`
    at: int  # the place of the whole block's first byte in the memory
    is_out: bool  # from the pools to the memory
    mark: int  # the copy starts when the rank's device has reached this mark


def memory_bytes(layout: KvLayout, config: EngineConfig) -> int:
    """Returns the size of the memory: the slots of the tier in host memory, and the rings of two
    channels for each tier and KV group."""
    sizes = [group.layout.block_bytes for group in layout.groups]
    slots = _aligned(config.kv_host_bytes) + len(sizes) * _ALIGNMENT
    return slots + 2 * len(config.tiers) * sum(_aligned(ring_slots(size) * size) for size in sizes)


class RankCopies:
    """Has the ranks copy blocks. Used by rank 0."""

    def __init__(
        self, memory: Bytes, others: Sequence[RankPipe], on_mark: Callable[[int], object]
    ) -> None:
        """`memory` is mapped by all ranks. `others` are the pipes to ranks 1 and up. `on_mark` has
        all ranks record a mark; it is called in the engine's thread."""
        self._memory = memory
        self._address = memory.ctypes.data
        self._num_taken = 0  # bytes of the memory that slots and rings have
        own, self.own_end = Pipe()  # the server of rank 0 gets `own_end`
        self._links = [_Link(pipe) for pipe in (own, *others)]
        self._sending = threading.Lock()
        self._num_sent = 0
        self._on_mark = on_mark
        self._num_marks = 0

    def mark(self) -> Mark:
        """Returns a mark that follows all work that the engine has submitted to the ranks. Must be
        called in the engine's thread. Raises RankEnded."""
        self._num_marks += 1
        self._on_mark(self._num_marks)
        return Mark(self._num_marks)

    def host_pages(self, num_bytes: int) -> HostPages:
        first = self._num_taken
        self._num_taken = _aligned(first + num_bytes)
        assert self._num_taken <= len(self._memory)
        return HostPages(self._memory[first : first + num_bytes], is_device_accessible=True)

    def copy(
        self, group: int, block_id: int, host: Bytes, after: Event, *, is_out: bool
    ) -> CopyOfRanks:
        """Starts to copy a block from or to `host`, a part of the memory. May be called in any
        thread."""
        assert isinstance(after, Mark)
        at = host.ctypes.data - self._address
        copy = Copy(group, block_id, at, is_out, after.number)
        # The answers that no thread has read fit into the pipes, because each channel waits for its
        # older copies.
        with self._sending:
            for link in self._links:
                link.send(copy)
            self._num_sent += 1
            return CopyOfRanks(self._links, self._num_sent)


class Mark(NamedTuple):
    """A point in the order of the work of all ranks. Only a copy can wait for it."""

    number: int

    def query(self) -> bool:
        raise NotImplementedError

    def synchronize(self) -> None:
        raise NotImplementedError


class CopyOfRanks(NamedTuple):
    """The end of a copy on all ranks."""

    links: Sequence[_Link]
    number: int  # of all copies

    def query(self) -> bool:
        return all(link.is_done(self.number) for link in self.links)

    def synchronize(self) -> None:
        for link in self.links:
            link.wait(self.number)


class _Link:
    """Rank 0's end of the pipe to one rank."""

    def __init__(self, pipe: RankPipe) -> None:
        self._pipe = pipe
        self._reading = threading.Lock()
        self._num_done = 0

    def send(self, copy: Copy) -> None:
        with suppress(OSError):  # the rank has ended, and this copy does not
            self._pipe.send(copy)

    def wait(self, number: int) -> None:
        """Waits until the rank has made the first `number` copies. Does not return if the rank has
        ended, because its blocks are never safe then. The whole worker ends soon."""
        with self._reading:
            while self._num_done < number:
                if not self._read(timeout_s=None):
                    threading.Event().wait()

    def is_done(self, number: int) -> bool:
        """Returns whether the rank has made the first `number` copies."""
        if self._reading.acquire(blocking=False):  # otherwise another thread reads the answers
            try:
                while self._num_done < number and self._read(timeout_s=0.0):
                    pass
            finally:
                self._reading.release()
        return self._num_done >= number

    def _read(self, timeout_s: float | None) -> bool:
        """Takes one answer. Returns False if none comes in time, or if the rank has ended."""
        try:
            if not self._pipe.poll(timeout_s):
                return False
            self._pipe.recv_bytes()
        except (EOFError, OSError):
            return False
        self._num_done += 1
        return True


class CopyServer:
    """Copies one rank's heads between its pools and the memory."""

    def __init__(
        self, kv: torch.Tensor, layout: KvLayout, memory: Bytes, *, rank: int, num_ranks: int
    ) -> None:
        """`kv` is the memory of the rank's pools, and `layout` that of whole blocks."""
        self._memory = memory
        self._device = CudaDevice(kv.device) if kv.device.type == "cuda" else _Cpu()
        self._device.pin(memory)
        self._streams = {is_out: self._device.open_stream() for is_out in (False, True)}
        own = layout.of_rank(num_ranks)
        pools = torch.split(kv.view(-1), [group.layout.pool_bytes for group in own.groups])
        self._groups = []
        for pool, group, whole in zip(pools, own.groups, layout.groups, strict=True):
            replicas = RankHeads(whole.layout.num_kv_heads, num_ranks).replicas
            rows = pool.view(group.layout.num_blocks, group.layout.block_bytes)
            self._groups.append(_OwnRows(rows, rank // replicas, is_first=rank % replicas == 0))
        self._marked = threading.Condition()
        self._num_marks = 0
        self._newest: Event = DONE  # of the newest mark

    def mark(self, number: int) -> None:
        """Records a mark, in the thread that submits the engine's work to the device."""
        event = self._device.mark()
        with self._marked:
            self._num_marks, self._newest = number, event
            self._marked.notify_all()

    def start(self, pipe: RankPipe) -> None:
        """Starts a thread that makes the copies which come through the pipe, until rank 0 ends."""
        threading.Thread(target=self._serve, args=(pipe,), name="tier-copies", daemon=True).start()

    def _serve(self, pipe: RankPipe) -> None:
        begun: deque[Event] = deque()
        try:
            while True:
                if begun and not pipe.poll():
                    begun.popleft().synchronize()
                    pipe.send_bytes(b"\0")
                else:
                    begun.append(self._begin(pipe.recv()))
        except (EOFError, OSError):
            return  # rank 0 has ended
        except Exception:
            # Rank 0 would wait for the copy for ever. Without this rank the worker ends.
            log.exception("a copy between a KV tier and this rank's pools failed")
            os._exit(1)
        finally:
            pipe.close()

    def _begin(self, copy: Copy) -> Event:
        with self._marked:
            self._marked.wait_for(lambda: self._num_marks >= copy.mark)
            after = self._newest  # follows the mark of the copy
        rows = self._groups[copy.group]
        row = rows.own[copy.block_id]
        first = copy.at + rows.part * len(row)
        host = torch.from_numpy(self._memory[first : first + len(row)])
        stream = self._streams[copy.is_out]
        if not copy.is_out:
            return stream.copy(row, host, after)
        return stream.copy(host, row, after) if rows.is_first else DONE


class _OwnRows(NamedTuple):
    """One rank's part of the blocks of a KV group."""

    own: torch.Tensor  # uint8 [num_blocks, bytes of the rank's heads]
    part: int  # the place of these bytes among the parts of a block
    is_first: bool  # of the ranks with the same heads


class RankBlocks(DeviceBlocks, Copier):
    """The blocks of one KV group, whose heads are divided among the pools of the ranks."""

    def __init__(self, copies: RankCopies, group: int, block_bytes: int) -> None:
        self._copies = copies
        self._group = group
        self._block_bytes = block_bytes

    def mark(self) -> Event:
        return self._copies.mark()

    def open_channel(self) -> Channel:
        return StagedChannel(self, self._block_bytes, self._copies.host_pages)

    def host_pages(self, num_bytes: int) -> HostPages:
        return self._copies.host_pages(num_bytes)

    def copy_out(self, block_id: int, host: Bytes, after: Event) -> Event:
        return self._copies.copy(self._group, block_id, host, after, is_out=True)

    def copy_in(self, block_id: int, host: Bytes, after: Event) -> Event:
        return self._copies.copy(self._group, block_id, host, after, is_out=False)


class _Cpu(Stream):
    """A CPU, whose work is done when it is submitted."""

    def mark(self) -> Event:
        return DONE

    def open_stream(self) -> Stream:
        return self

    def pin(self, data: Bytes) -> bool:
        return True

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        target.copy_(source)
        return DONE


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
