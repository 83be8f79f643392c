"""Messages between a worker's two processes, encoded as msgpack over ZeroMQ.

The I/O process sends `Command`s. The engine process applies them between two steps. It sends one
`Report` per turn of its loop.

Two messages are sent during a step, so that consumers need not wait for the end of the step:

- `BlocksFinal` announces blocks whose KV is complete.
- `PullsSettled` reports pulls that have ended. The transfer thread sends it.
"""

import msgspec

from tandem.common.config.engine import EngineConfig
from tandem.common.config.transfer import TransferConfig
from tandem.common.perf_model.rates import WorkerRates
from tandem.common.retention import Kept, Retention
from tandem.engine.cache.layout.block_spans import BlockSpans
from tandem.engine.types import FinalBlocks, SequenceSpec, StepReport
from tandem.transfer.reads import messages as transfer


class EngineSettings(msgspec.Struct, frozen=True):
    """Settings that the engine process reads from standard input at its start."""

    worker_id: str
    epoch: str
    engine: EngineConfig
    transfer: TransferConfig
    commands_address: str
    transfers_address: str
    cores: list[int]
    parent_pid: int  # pid of the I/O process; the engine process ends with it
    pool_fd: int | None = None  # memfd of the KV pool, which the I/O process maps, too
    gpu_wait_s: float = 0.0  # longest wait for memory of the GPU that is not free yet


class Add(msgspec.Struct, frozen=True, tag=True):
    spec: SequenceSpec


class StartLocalPrefill(msgspec.Struct, frozen=True, tag=True):
    """Prefill a WAITING_FOR_REMOTE_KV sequence locally. None of its blocks was pulled."""

    sequence_id: str


class Restart(msgspec.Struct, frozen=True, tag=True):
    """Drop a sequence's pulled blocks and queue it again with `spec`, at the head of the queue."""

    spec: SequenceSpec


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Commit pulled blocks after the producer's event `released` confirmed them.

    `first_token_id` is the token that the producer sampled after the prompt.
    """

    sequence_id: str
    first_token_id: int
    # For each block of the prompt: the sum of the attention weights on the keys of the block. The
    # list is empty if the KV budget does not need these sums.
    block_sums: list[float] = []


class ContinuePrefill(msgspec.Struct, frozen=True, tag=True):
    """Compute the rest of a prompt, after a pull. The first `num_blocks` blocks are valid."""

    sequence_id: str
    num_blocks: int  # number of valid blocks: those that were cached before, and the pulled ones


class HoldPrefix(msgspec.Struct, frozen=True, tag=True):
    """Hold the cached blocks of a chain of block hashes for a consumer until `Remove`.

    Blocks that only tiers have are loaded first, if this is expected to take at most `load_s_max`
    seconds. The engine reports `Held`.
    """

    sequence_id: str
    block_hashes: list[bytes]
    first_wanted_block: int
    load_s_max: float = 0.0


class ImportBlocks(msgspec.Struct, frozen=True, tag=True):
    """Reserve blocks for a chain that is pulled from a peer. The engine reports `Reserved`.

    Only free blocks are reserved, so no cached block is evicted for the import.
    """

    sequence_id: str
    block_hashes: list[bytes]


class CommitImport(msgspec.Struct, frozen=True, tag=True):
    """Cache an imported chain's first `num_blocks` blocks, which are valid, and end the import."""

    sequence_id: str
    num_blocks: int


class ListChains(msgspec.Struct, frozen=True, tag=True):
    """Request the most recently used chains; answered by `Chains`."""

    request_id: int
    blocks_max: int


class ListBlocks(msgspec.Struct, frozen=True, tag=True):
    """Request the hashes of the cached blocks in a range of hashes; answered by `Blocks`."""

    request_id: int
    first: bytes  # start of the range, included
    end: bytes  # end of the range, not included; empty: up to the last hash
    tier: str = ""  # name of the tier; empty: the pool


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Drop all cached blocks that no sequence uses; answered by `PrefixCacheReset`."""

    request_id: int


class KeepChain(msgspec.Struct, frozen=True, tag=True):
    """Pin a chain of blocks; answered by `ChainKept`."""

    request_id: int
    tenant: bytes  # salt of the tenant's block hashes
    retention: Retention
    block_hashes: list[bytes]


class Remove(msgspec.Struct, frozen=True, tag=True):
    """Abort a sequence, or free the blocks that are held for a chain."""

    sequence_id: str


class ReturnWaiting(msgspec.Struct, frozen=True, tag=True):
    """End at most `count` of the sequences in `sequence_ids`, the oldest first, so that the router
    can place them on other workers.

    Only sequences for which nothing was computed yet are ended. They fail with the error
    `Returned`.
    """

    sequence_ids: list[str]
    count: int


class ConnectPeer(msgspec.Struct, frozen=True, tag=True):
    """Make a peer's pools readable over a transport, "nixl" or "cuda_ipc"; answered by
    `PeerConnected`."""

    peer_id: str
    ranks: list[transfer.PeerRank]  # the peer's ranks in order
    transport: str


class DisconnectPeer(msgspec.Struct, frozen=True, tag=True):
    peer_id: str
    transport: str


class StartPull(msgspec.Struct, frozen=True, tag=True):
    """Pull a run of blocks into blocks that the sequence holds."""

    sequence_id: str
    pull: transfer.Pull


class StoreBytes(msgspec.Struct, frozen=True, tag=True):
    """Write bytes of blocks that arrived over gRPC. The bytes are in the next frame."""

    sequence_id: str
    block_ids: list[int]


class LoadBytes(msgspec.Struct, frozen=True, tag=True):
    """Request the bytes of blocks that a PREFILL_ONLY sequence holds; answered by `BlockData`."""

    request_id: int
    sequence_id: str
    block_ids: list[int]


class StoreProbe(msgspec.Struct, frozen=True, tag=True):
    """Move the bytes of the next frame to the pool's device, as `StoreBytes` does, and drop
    them."""


class LoadProbe(msgspec.Struct, frozen=True, tag=True):
    """Request zero bytes from the pool's device, on the way of `LoadBytes`; answered by
    `BlockData`."""

    request_id: int
    num_bytes: int


class EncodePool(msgspec.Struct, frozen=True, tag=True):
    """Says whether there is an encode worker, from which the engine can request embeddings."""

    is_up: bool


class ImageEncoded(msgspec.Struct, frozen=True, tag=True):
    """The answer to `ImageWanted`. The next frame has the embedding, fp32 [rows, hidden], unless
    there is an `error`."""

    request_id: int
    error: str


class DescribeSource(msgspec.Struct, frozen=True, tag=True):
    """Request the data with which a consumer can read this pool; answered by `ProducerReady`."""

    request_id: int


class CheckIntegrity(msgspec.Struct, frozen=True, tag=True):
    request_id: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


SequenceCommand = (
    Add | StartLocalPrefill | Restart | Commit | ContinuePrefill | Remove | ReturnWaiting
)
ChainCommand = HoldPrefix | ImportBlocks | CommitImport
TransferCommand = ConnectPeer | DisconnectPeer | StartPull | StoreBytes | StoreProbe
Question = (
    ListChains
    | ListBlocks
    | ResetPrefixCache
    | KeepChain
    | LoadBytes
    | LoadProbe
    | DescribeSource
    | CheckIntegrity
)
ImageCommand = EncodePool | ImageEncoded
Command = SequenceCommand | ChainCommand | TransferCommand | ImageCommand | Question | Shutdown

# After one of these commands, no pull may write the sequence's blocks any more.
ENDS_OF_PULLS = (Commit, CommitImport, ContinuePrefill, Remove, Restart)


def sequence_id(command: Command) -> str:
    """Returns the id of the command's sequence; "" if the command concerns no sequence."""
    if isinstance(command, Add | Restart):
        return command.spec.sequence_id
    return str(getattr(command, "sequence_id", ""))


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded, and the engine applies commands from now on. Sent once."""

    model_fingerprint: str
    compute_dtype: str
    numerics: str
    kv_dtype: str
    layout: str
    num_blocks: int
    spans: BlockSpans
    max_model_len: int
    rates: WorkerRates  # initial rates, before any step is measured
    load_ms: dict[str, float]  # duration in ms of each phase of loading the model
    kernels: str = ""  # the kernels that compute, such as "native (avx512)", "triton" or "torch"
    pool_is_shared: bool = False  # True: the pool is in the memfd `EngineSettings.pool_fd`


class Report(msgspec.Struct, frozen=True, tag=True):
    """The results of one turn of the engine process's loop.

    `tick` counts all turns, also those without a step. While the engine has a sequence, `tick`
    stops growing only if the engine hangs.
    """

    tick: int
    step: StepReport
    num_commands: int = 0  # commands that the engine has applied since its start


class BlocksFinal(msgspec.Struct, frozen=True, tag=True):
    """Blocks that consumers may pull now. The message is sent during the step that computes the
    blocks' last tokens.

    All other results of the step are in its `Report`.
    """

    final_blocks: list[FinalBlocks]


class ImageWanted(msgspec.Struct, frozen=True, tag=True):
    """A prompt needs the embedding of an image, which an encode worker can compute; answered by
    `ImageEncoded`."""

    request_id: int
    digest: bytes
    data: bytes  # the image's file
    num_rows: int
    hidden_size: int  # numbers of a row
    cache_salt: bytes  # of the prompt


class PullsSettled(msgspec.Struct, frozen=True, tag=True):
    results: list[transfer.PullResult]


class BlockData(msgspec.Struct, frozen=True, tag=True):
    """The answer to `LoadBytes` and `LoadProbe`. The next frame has the bytes, unless there is an
    `error`."""

    request_id: int
    error: str


class Chains(msgspec.Struct, frozen=True, tag=True):
    request_id: int
    chains: list[list[bytes]]  # block hashes of each chain, from its first block on


class Blocks(msgspec.Struct, frozen=True, tag=True):
    request_id: int
    hashes: list[bytes]


class PrefixCacheReset(msgspec.Struct, frozen=True, tag=True):
    request_id: int
    num_blocks: int  # number of dropped blocks


class ChainKept(msgspec.Struct, frozen=True, tag=True):
    request_id: int
    kept: Kept


class Integrity(msgspec.Struct, frozen=True, tag=True):
    request_id: int
    message: str  # description of the inconsistency; empty: all pools are consistent


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot continue; the worker exits with this message."""

    message: str
    code: str = ""  # code of an error in services/tandem/errors.py; empty for other errors


class WeightsProgress(msgspec.Struct, frozen=True, tag=True):
    """The progress of loading the model; sent before `Ready`."""

    num_bytes: int  # bytes of weight files loaded so far
    num_bytes_all: int


TransferReply = PullsSettled | transfer.Renewed | transfer.Broken
Event = (
    Report | BlocksFinal | ImageWanted | TransferReply
)  # messages that are sent without a request
Answer = (
    transfer.PeerConnected
    | BlockData
    | Chains
    | Blocks
    | PrefixCacheReset
    | ChainKept
    | transfer.ProducerReady
    | Integrity
)
Reply = WeightsProgress | Ready | Event | Answer | Fatal
