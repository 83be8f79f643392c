"""Measures the copies of KV tiers on a GPU, for benchmarks/gpu/kernels.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from tandem.engine.executor.triton.steps import TritonSteps
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.engine.tiers.device.blocks import BlocksInPlace, DeviceBlocks, HostPages
from tandem.engine.tiers.device.cuda import CudaDevice
from tandem.engine.tiers.device.staged_blocks import StagedBlocks
from tandem.engine.tiers.host import HostStorage
from tandem.engine.tiers.jobs import Load, LoadPart, Target, Write, write_all
from tandem.engine.tiers.storage import Entry
from tandem_kernels.kv_cache import KvPool
from tandem_kernels.sampling import Draw

if TYPE_CHECKING:
    from benchmarks.gpu.kernels import Bench

_GREEDY = Draw(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0)


class HostTier:
    """Copies of a pool's first blocks in host memory, by the jobs of an engine's tiers."""

    def __init__(self, blocks: DeviceBlocks, pages: HostPages, block_bytes: int) -> None:
        self._blocks = blocks
        self._storage = HostStorage(pages, block_bytes=block_bytes)
        self._num_blocks = self._storage.num_slots
        self._out, self._in = blocks.open_channel(), blocks.open_channel()

    def write(self) -> None:
        """Copies the first blocks of the pool out."""
        after = self._blocks.mark()
        writes = []
        for block_id in range(self._num_blocks):
            target = Target(0, self._storage, [block_id], is_rewrite=False)
            entry = Entry(block_id.to_bytes(16, "little"), b"")
            write = Write(block_id, entry, after, [target], 0, lambda *_: None)
            writes.append((write, target))
        write_all(writes, self._out)
        if not all(target.is_written for _, target in writes):
            raise RuntimeError("a block was not written")

    def load(self, first: int) -> None:
        """Copies them in, to blocks from `first` on."""
        parts = [
            LoadPart(0, self._storage, slot, slot.to_bytes(16, "little"), first + slot)
            for slot in range(self._num_blocks)
        ]
        load = Load(
            sequence_id="",
            chain=[part.block_hash for part in parts],
            parts=parts,
            tables={},
            share=1.0,
            num_spared=0,
            channels=[[self._in]],
            after=self._blocks.mark(),
            clock=time.perf_counter,
            on_end=lambda _: None,
            continue_in=lambda *_: None,
        )
        load()
        if load.num_read != len(parts):
            raise RuntimeError(f"{load.num_read} of {len(parts)} blocks were loaded")


def measure_tiers(bench: Bench, steps: TritonSteps, pools: list[KvPool]) -> None:
    """Bytes, both directions, and the first token of a prompt that is in host memory."""
    tier, in_s = measure_copies(bench, pools[0].memory)
    measure_first_token(bench, steps, pools, tier, in_s)


def measure_copies(
    bench: Bench, memory: torch.Tensor, goal: float | None = None
) -> tuple[HostTier, float]:
    """Copies the blocks of a prompt, in both directions. `goal` is for the copies straight to and
    from pinned memory. Returns the tier with these copies, and the seconds of one copy in."""
    size = bench.size
    num_tokens = size.chunks[-1]
    num_blocks, block_bytes = -(-num_tokens // size.block_size), memory.shape[1]
    num_bytes, first = num_blocks * block_bytes, len(memory) - num_blocks
    blocks: DeviceBlocks
    if memory.device.type == "cuda":
        blocks = StagedBlocks(memory, CudaDevice(memory.device))
    else:
        blocks = BlocksInPlace(memory.numpy())
    pages = blocks.host_pages(num_bytes)
    print(f"host memory is {'pinned' if pages.is_device_accessible else 'not pinned'}")
    out_s, in_s = copy_seconds(bench, memory[:num_blocks])
    what = f"{num_bytes / 1e6:,.0f} MB of blocks"
    tiers = {
        "straight": HostTier(blocks, pages, block_bytes),
        "by buffers": HostTier(
            blocks, HostPages(pages.data, is_device_accessible=False), block_bytes
        ),
    }
    for how, tier in tiers.items():
        wanted = goal if how == "straight" else None
        check_bytes(tier, memory, num_blocks, first)
        measured_s = bench.wall_seconds(tier.write, size.repeats)
        bench.add(f"{what} to host memory, {how} (floor: one copy)", out_s, measured_s, wanted)
        measured_s = bench.wall_seconds(partial(tier.load, first), size.repeats)
        bench.add(f"{what} from host memory, {how} (floor: one copy)", in_s, measured_s, wanted)
    return tiers["straight"], in_s


def measure_first_token(
    bench: Bench, steps: TritonSteps, pools: list[KvPool], tier: HostTier, in_s: float
) -> None:
    """Loads a prompt and computes its last token. `in_s`: one copy of as many bytes."""
    size, num_tokens = bench.size, bench.size.chunks[-1]
    num_blocks = len(pools[0].memory)
    first = num_blocks - -(-num_tokens // size.block_size)
    table = list(range(first, num_blocks))
    whole = StepBatch([SequenceSlice([7] * num_tokens, num_tokens, table, True)])
    last = StepBatch([SequenceSlice([7], num_tokens, table, True)])

    def step(batch: StepBatch) -> list[int]:
        return steps.sample(steps.forward(batch, pools), [_GREEDY])

    def from_host() -> None:
        tier.load(first)
        step(last)

    computed_s = bench.wall_seconds(lambda: step(whole), size.repeats)
    loaded_s = bench.wall_seconds(from_host, size.repeats)
    what = f"first token after {num_tokens} tokens from host memory"
    bench.add(f"{what} (floor: computed)", computed_s, loaded_s)
    step_s = bench.wall_seconds(lambda: step(last), size.repeats)
    bench.add(f"{what} (floor: one copy and a step)", in_s + step_s, loaded_s, goal=1 / 1.5)


def check_bytes(tier: HostTier, memory: torch.Tensor, num_blocks: int, first: int) -> None:
    """Raises RuntimeError if blocks come back with other bytes."""
    source = torch.randint(0, 256, (num_blocks, memory.shape[1]), dtype=torch.uint8)
    memory[:num_blocks] = source.to(memory.device)
    tier.write()
    memory[:num_blocks].zero_()
    memory[first:].zero_()
    tier.load(first)
    if not torch.equal(memory[first:].cpu(), source):
        raise RuntimeError("blocks came back from host memory with other bytes")
    memory.zero_()  # no NaN for the steps to come


def copy_seconds(bench: Bench, rows: torch.Tensor) -> tuple[float, float]:
    """Returns how long one copy of as many bytes takes, to pinned host memory and from it."""
    host = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=rows.is_cuda)

    def timed(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            if rows.is_cuda:
                torch.cuda.synchronize()

        return copy

    repeats = bench.size.repeats
    out_s = bench.wall_seconds(timed(host, rows), repeats)
    return out_s, bench.wall_seconds(timed(rows, host), repeats)
