"""Settings for the transfer of KV blocks between workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from tandem.common.config.groups import MEASUREMENT, TRANSFER
from tandem.common.options import (
    Constant,
    Count,
    NotNegative,
    Options,
    Positive,
    PositiveSeconds,
    Seconds,
)

Transport = Literal["auto", "cuda_ipc", "nixl", "grpc"]
NixlTcp = Literal["off", "insecure"]
PrefillAt = Literal["auto", "remote", "local"]
VerifyBlocks = Literal["off", "sample", "all"]


@Parameter(name="*", group=TRANSFER)
@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig(Options):
    """Settings for the transfer of KV blocks to this worker: transport, choice of the pool that
    prefills, limits and deadlines."""

    transport: Transport = "auto"
    """Transport of KV blocks. auto: the fastest one that works between two workers. cuda_ipc: only
    between GPUs of one machine."""
    nixl_tcp: NixlTcp = "off"
    """off: NIXL uses only shared memory and RDMA. insecure: NIXL may use TCP, and anyone who
    reaches NIXL's port can then write to the worker's memory."""
    prefill_at: PrefillAt = "auto"
    """Where long prompts are computed. remote: by prefill workers. local: by decode workers. auto:
    where the prompt is predicted to finish first; prefill workers with auto also decode requests
    while decode workers are much busier."""
    local_prefill_max_tokens: Count = 64
    """Prompts with at most this many uncached tokens are computed by the decode worker itself."""
    verify_blocks: VerifyBlocks = "off"
    """Compare none, a sample or all of the pulled KV blocks with checksums of the sending worker.
    If a block differs, the pull fails, and its blocks are not used."""
    delay_s: Annotated[Seconds, Parameter(group=MEASUREMENT, name="--transfer-delay")] = 0.0
    """Seconds that are added to each transfer of KV blocks, for tests."""
    bytes_per_s: Annotated[
        NotNegative, Parameter(group=MEASUREMENT, name="--transfer-bandwidth")
    ] = 0.0
    """Limits all transfers together to this many bytes per second, for tests. 0: no limit."""
    overlap: Annotated[bool, Parameter(group=MEASUREMENT)] = True
    """Transfer the first KV blocks of a prompt while the later blocks are computed. With
    --no-overlap, the transfer starts after the whole prompt is computed."""
    heartbeat_timeout_s: PositiveSeconds = 30.0
    """A worker stops waiting for KV blocks of another worker if the engine of the other worker
    computes nothing for this many seconds. The waiting worker then pulls the blocks from a third
    worker, or computes the blocks."""
    pull_deadline_s: PositiveSeconds = 30.0
    """Longest time for the transfer of one group of KV blocks, in seconds."""
    encode_deadline_s: PositiveSeconds = 30.0
    """Longest time in seconds for which a worker waits for the embedding of an image from an encode
    worker. After it, the worker computes the image itself."""
    warm_blocks: Count = 0
    """Number of KV blocks that a new worker copies from other workers. 0: none."""
    connect_deadline_s: Constant[float] = 5.0
    # Seconds between two heartbeats that a producer sends to the consumer of a lease.
    heartbeat_interval_s: Constant[float] = 0.5
    release_deadline_s: Constant[float] = 5.0
    # Largest number of quarantined blocks. A block is quarantined while an unfinished pull may
    # still write to it. With more of them, no pull starts until the agent is replaced.
    quarantine_blocks_max: Constant[int] = 256
    # Largest number of open leases of one producer. The producer refuses further leases.
    leases_max: Constant[int] = 256
    leases_per_consumer_max: Constant[int] = 128
    # Largest number of bytes in all running pulls of this worker. The pulls from one peer may have
    # at most half of these bytes.
    pull_bytes_in_flight_max: Constant[Positive] = 256 << 20
    # A producer refuses new leases while more than this fraction of its KV pool is in finished
    # blocks of leases that consumers have not released yet.
    leased_blocks_max_share: Constant[float] = 0.9

    @property
    def verify_every(self) -> int:
        """Returns N if the checksums of every Nth pulled block are compared; 0 for no block."""
        return {"off": 0, "sample": 16, "all": 1}[self.verify_blocks]
