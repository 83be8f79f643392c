"""Plans how a worker uses the memory of its GPU, by measuring each part before the KV pool exists.

    total      [ other programs | weights | step | graphs | KV pool | not used ]
                                |<- at most utilization x total   ->|

1. `begin` waits until no other worker of this user starts on the GPU, and reads the free memory.
2. The weights are loaded; `weights_loaded` measures them.
3. `measure` computes on a small scratch pool: it records the CUDA graphs once to measure them, and
   runs the largest step that the scheduler may choose to measure the peak.
4. `with_pool_size` gives the rest to the KV pool. If the settings give the size of the pool, it
   checks that the pool fits.
5. The runner allocates the pool and records the graphs again, over this pool. `end` lets the next
   worker start.

CUDA does not say how much memory a single process uses, only how much of the GPU is free. So a
measurement is right only while no other process allocates. Workers on one GPU therefore take turns,
by a lock on a file. CUDA's context is allocated before step 1 and is not part of the plan.
"""

import errno
import fcntl
import gc
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import torch

from tandem.common.config.engine import EngineConfig
from tandem.engine.memory import pool_option
from tandem.errors import ConfigError

log = logging.getLogger(__name__)

_SPARE = 0.01  # share of the GPU's total memory that stays free if other programs use the GPU
_LOOK_S = 0.2  # interval of attempts to take the lock, and of reads of the free memory
_TELL_S = 60.0  # interval of log messages while another worker has the lock
_TURN_S_MAX = 1800.0  # longest wait for other workers on this GPU


@dataclass(frozen=True, slots=True)
class Parts:
    """The memory of each part of a worker, in bytes. None: not measured yet."""

    weights: int | None = None
    step: int | None = None  # what the largest step needs at its peak
    graphs: int | None = None  # the CUDA graphs, the kernels' code and the libraries' workspaces
    pool: int | None = None

    @property
    def total_bytes(self) -> int:
        return sum(part or 0 for part in (self.weights, self.step, self.graphs, self.pool))

    def describe(self) -> str:
        named = {
            "weights": self.weights,
            "largest step": self.step,
            "CUDA graphs": self.graphs,
            "KV pool": self.pool,
        }
        return ", ".join(
            f"{name} {'not known yet' if part is None else f'{part:,} bytes'}"
            for name, part in named.items()
        )


class GpuMemory:
    """The memory of one worker on one CUDA device. The calls come in the order of the module's
    list."""

    def __init__(
        self, device: torch.device, config: EngineConfig, lock_folder: Path | None = None
    ) -> None:
        self._device = device
        self._config = config
        self._lock_folder = lock_folder or Path(tempfile.gettempdir())
        self._lock: IO[bytes] | None = None  # the locked file while this worker has its turn
        self._free_at_start = self._total = 0
        self.parts = Parts()

    def begin(self, weights_bytes: int, pool_bytes: int, wait_s: float = 0.0) -> None:
        """Takes the lock, and checks that the weights and a pool of a given size can fit.

        `weights_bytes` is an estimate. `pool_bytes` is 0 if the settings leave the pool's size to
        the plan. Raises ConfigError if the memory does not suffice.

        If the GPU is large enough but too little of it is free, waits at most `wait_s` seconds.
        CUDA frees a process's memory only after the end of the process, and not while another
        process has mapped the memory. Peers on this machine map the KV pool of a worker, and unmap
        it some seconds after the worker was killed, when they disconnect. With --transport nixl,
        UCX keeps it mapped until the mapping process ends.
        """
        self._take_turn()
        expected = Parts(weights=weights_bytes, pool=pool_bytes or None)
        self._wait_for_memory(expected.total_bytes if pool_bytes else None, wait_s)
        limit = self._free_at_start if pool_bytes else self._limit
        if expected.total_bytes >= limit:
            self.release()
            raise ConfigError(self._too_little(expected, limit))

    def _wait_for_memory(self, needed_bytes: int | None, wait_s: float) -> None:
        """Waits until so much memory is free, by default the worker's share, and reads the free
        memory."""
        self._free_at_start, self._total = torch.cuda.mem_get_info(self._device)
        if needed_bytes is None:
            needed_bytes = int(self._total * self._config.gpu_memory_utilization)
        if wait_s <= 0 or not self._free_at_start < needed_bytes <= self._total:
            return
        log.warning(
            "this worker should get %.1f GB of the GPU's memory, but only %.1f of %.1f GB are "
            "free. The worker waits up to %g s for more. The memory of a killed worker becomes "
            "free only when all workers that read from the killed worker have disconnected; if "
            "the wait fails, restart these workers",
            needed_bytes / 1e9,
            self._free_at_start / 1e9,
            self._total / 1e9,
            wait_s,
        )
        ends_at = time.monotonic() + wait_s
        while time.monotonic() < ends_at and self._free_at_start < needed_bytes:
            time.sleep(_LOOK_S)
            self._free_at_start, self._total = torch.cuda.mem_get_info(self._device)

    def weights_loaded(self) -> None:
        """Measures the weights."""
        self.parts = replace(self.parts, weights=self._free_at_start - self._free())

    @property
    def scratch_bytes(self) -> int:
        """Size up to which the scratch pool may grow, in bytes: a quarter of what is left. Kernels
        are tuned on this pool, on contexts that it can hold."""
        return max(0, (self._limit - self.parts.total_bytes) // 4)

    def measure(self, record_graphs: Callable[[], object], run_step: Callable[[], object]) -> None:
        """Measures the graphs and the largest step. The caller has allocated the scratch pool, and
        frees it and the graphs after this call."""
        free = self._free()
        record_graphs()
        # The first run may compile and tune kernels. It then takes memory that later steps do not.
        run_step()
        graphs = free - self._free()
        self.parts = replace(self.parts, graphs=graphs)
        torch.cuda.reset_peak_memory_stats(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        run_step()
        torch.cuda.synchronize(self._device)
        # The reserved memory is what the GPU must have free. It is more than the memory of all
        # tensors, because free pieces between tensors are too small for some of them.
        step = torch.cuda.max_memory_reserved(self._device) - reserved
        self.parts = replace(self.parts, step=step)

    def with_pool_size(self, config: EngineConfig, pool_bytes: int) -> EngineConfig:
        """Returns the settings with the size of the KV pool. `pool_bytes` is the size of the pool
        that the settings give, 0 if they give none. Raises ConfigError if there is no room."""
        self._free()  # returns the scratch pool to the GPU
        limit = self._free_at_start if pool_bytes else self._limit
        left = limit - self.parts.total_bytes
        if left <= 0 or pool_bytes > left:
            raise ConfigError(self._too_little(replace(self.parts, pool=pool_bytes or None), limit))
        self.parts = replace(self.parts, pool=pool_bytes or left)
        return config if pool_bytes else replace(config, kv_bytes_max=left)

    def end(self) -> None:
        """Logs the plan, and lets the next worker start on this GPU."""
        if self._lock is None:
            return
        free, total = torch.cuda.mem_get_info(self._device)
        log.info(
            "the GPU has %s bytes of memory; this worker takes: %s; %s bytes are still free",
            f"{total:,}",
            self.parts.describe(),
            f"{free:,}",
        )
        self.release()

    def release(self) -> None:
        """Lets the next worker start on this GPU."""
        if self._lock is not None:
            # The lock ends even if a forked process still has the file open.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._lock.close()
            self._lock = None

    @contextmanager
    def explains(self, doing: str) -> Iterator[None]:
        """Replaces CUDA's out-of-memory errors by a ConfigError that says what each part needs.
        After any error, the next worker may start. `doing` says what runs inside, as in "the
        weights were loaded"."""
        try:
            yield
        except Exception as error:
            self.release()
            if not is_out_of_memory(error):
                raise
            why = f"the GPU's memory ran out while {doing}: {self._description()}"
            raise ConfigError(f"{why}; {self._remedy(self.parts)}") from error

    @property
    def _limit(self) -> int:
        """The largest sum of all parts, in bytes, if the plan chooses the size of the pool."""
        share = int(self._total * self._config.gpu_memory_utilization)
        return min(share, self._free_at_start - int(_SPARE * self._total))

    def _free(self) -> int:
        """Returns the free memory of the GPU after torch has returned what no tensor uses."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)

    def _too_little(self, parts: Parts, limit: int) -> str:
        return (
            f"the GPU has too little memory for this worker, which may use {limit:,} bytes: "
            f"{self._description(parts)}; {self._remedy(parts)}"
        )

    def _description(self, parts: Parts | None = None) -> str:
        return (
            f"{(parts or self.parts).describe()}; gpu-memory-utilization "
            f"{self._config.gpu_memory_utilization:g} of {self._total:,} bytes, "
            f"{self._free_at_start:,} bytes were free"
        )

    def _remedy(self, parts: Parts) -> str:
        """Returns what to lower, or raise, so that the parts fit."""
        share = self._config.gpu_memory_utilization
        smaller = "choose a smaller or a quantized model"
        lower = f"lower --max-tokens-per-step or --max-num-seqs, or {smaller}"
        if not self._config.has_default_pool:
            option = pool_option(self._config)
            given = f"lower {option}, --max-tokens-per-step or --max-num-seqs"
            if parts.total_bytes > self._total:
                return given
            return (
                f"{given}, or end other programs on this GPU. If a worker of this GPU was killed, "
                "restart the peers of that worker, which keep its KV pool mapped"
            )
        if parts.pool is not None:  # the plan has chosen a pool that was too large
            return f"lower --gpu-memory-utilization; or {lower}"
        if parts.step is None:
            lower = smaller
        if self._free_at_start < share * self._total:
            return (
                f"end other programs on this GPU, or {lower}. If a worker of this GPU was killed, "
                "restart the peers of that worker, which keep its KV pool mapped"
            )
        if share < 0.9:
            return f"start fewer workers on this GPU, raise --gpu-memory-utilization, or {lower}"
        return lower

    def _take_turn(self) -> None:
        path = self._lock_folder / f"tandem-{os.getuid()}-{_card_name(self._device)}.lock"
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            lock = open(os.open(path, flags, 0o600), "r+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"the lock file {path} for worker starts on this GPU cannot be opened "
                f"({error.strerror}). Remove the file, or set TMPDIR to another folder for all "
                "workers on this GPU"
            ) from error
        try:
            self._wait_for(lock)
            lock.truncate(0)
            os.pwrite(lock.fileno(), f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            lock.close()
            raise
        self._lock = lock

    def _wait_for(self, lock: IO[bytes]) -> None:
        """Waits until this worker has the lock. Raises ConfigError if that takes too long."""
        began = time.monotonic()
        tell_at = began
        while not _is_locked(lock):
            now = time.monotonic()
            holder = os.pread(lock.fileno(), 20, 0).decode("ascii", "replace").strip()
            other = f"process {holder}" if holder else "another process"
            if now - began > _TURN_S_MAX:
                raise ConfigError(
                    f"another worker ({other}) has been starting on this GPU for more than "
                    f"{_TURN_S_MAX / 60:.0f} minutes; read the log of that worker, or end that "
                    "worker"
                )
            if now >= tell_at:
                tell_at = now + _TELL_S
                log.info("waiting until %s has started on this GPU", other)
            time.sleep(_LOOK_S)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an exception says that a GPU has no memory left. Triton, cuBLAS and the
    capture of graphs raise a RuntimeError instead of torch's own class."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    text = str(error).lower()
    is_full = "out of memory" in text or "cublas_status_alloc_failed" in text
    return isinstance(error, RuntimeError) and is_full and "cuda" in text


def _is_locked(lock: IO[bytes]) -> bool:
    """Tries to take the lock. The system frees it when the process ends, also after a kill -9."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def _card_name(device: torch.device) -> str:
    """Returns a name of the GPU, or the MIG instance, that is the same in all processes of the
    machine, whatever CUDA_VISIBLE_DEVICES says."""
    properties = torch.cuda.get_device_properties(device)
    return f"gpu-{getattr(properties, 'uuid', '') or device.index or 0}"
