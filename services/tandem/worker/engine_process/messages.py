"""Messages between a worker's two processes, msgpack over ZeroMQ.

The I/O process sends `Command`s; the engine process applies them between two steps. It answers
with one `Report` a step, and before it with one `BlocksFinal` when blocks become final in the step:
their consumers do not wait for its end. The transfer thread answers with one `PullsSettled` as soon
as pulls settle: a long step does not delay a Release.
"""

import msgspec

from tandem.common.config.engine import EngineConfig
from tandem.common.config.transfer import TransferConfig
from tandem.common.perf_model.rates import WorkerRates
from tandem.common.retention import Kept, Retention
from tandem.engine.cache.layout.block_spans import BlockSpans
from tandem.engine.types import FinalBlocks, SequenceSpec, StepReport
from tandem.transfer.nixl import messages as transfer


class EngineSettings(msgspec.Struct, frozen=True):
    """The I/O process hands these to the engine process at its start, on standard input."""

    worker_id: str
    epoch: str
    engine: EngineConfig
    transfer: TransferConfig
    commands_address: str
    transfers_address: str
    cores: list[int]
    parent_pid: int  # of the I/O process: the engine process ends with it
    pool_fd: int | None = None  # a memfd for the KV pool, which the I/O process maps, too


class Add(msgspec.Struct, frozen=True, tag=True):
    spec: SequenceSpec


class StartLocalPrefill(msgspec.Struct, frozen=True, tag=True):
    """Prefill a WAITING_FOR_REMOTE_KV sequence here after all; none of its blocks was pulled."""

    sequence_id: str


class Restart(msgspec.Struct, frozen=True, tag=True):
    """Give up what was pulled: the sequence waits again, at the queue's head, with `spec`."""

    spec: SequenceSpec


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Commit pulled blocks, which `Released` made good; `first_token_id` follows the prompt."""

    sequence_id: str
    first_token_id: int
    block_sums: list[float] = []  # as `Prefilled` had them


class ContinuePrefill(msgspec.Struct, frozen=True, tag=True):
    """Compute the rest of a sequence that awaits its prefix: `num_blocks` first blocks are good."""

    sequence_id: str
    num_blocks: int  # the cached ones counted in


class PinPrefix(msgspec.Struct, frozen=True, tag=True):
    """Keep what is cached of a chain for a consumer, until `Remove`; reported `Held`."""

    sequence_id: str
    block_hashes: list[bytes]
    first_wanted_block: int


class ImportBlocks(msgspec.Struct, frozen=True, tag=True):
    """Take FREE blocks for a chain that comes from a peer; reported `Reserved`."""

    sequence_id: str
    block_hashes: list[bytes]


class CommitImport(msgspec.Struct, frozen=True, tag=True):
    """Cache an imported chain's first `num_blocks` blocks, which are good, and end the chain."""

    sequence_id: str
    num_blocks: int


class ListChains(msgspec.Struct, frozen=True, tag=True):
    """Ask for the chains used last; answered by `Chains`."""

    request_id: int
    blocks_max: int


class ListBlocks(msgspec.Struct, frozen=True, tag=True):
    """Ask for the hashes from `first` to `end` (not counted in); answered by `Blocks`."""

    request_id: int
    first: bytes
    end: bytes  # empty: to the last
    tier: str = ""  # of which; empty: of the pool


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Drop all cached blocks that nobody uses; answered by `PrefixCacheReset`."""

    request_id: int


class KeepChain(msgspec.Struct, frozen=True, tag=True):
    """Pin a chain of blocks; answered by `ChainKept`."""

    request_id: int
    tenant: bytes  # the salt of its hashes
    retention: Retention
    block_hashes: list[bytes]


class Remove(msgspec.Struct, frozen=True, tag=True):
    """End a sequence or chain that nobody needs any more: abort it, or free its pinned blocks."""

    sequence_id: str


class ReturnWaiting(msgspec.Struct, frozen=True, tag=True):
    """End some of these sequences of which nothing was begun, the oldest first: each fails as
    `returned`."""

    sequence_ids: list[str]
    count: int


class ConnectPeer(msgspec.Struct, frozen=True, tag=True):
    """Make a peer's pool readable over NIXL; answered by `PeerConnected`."""

    peer_id: str
    metadata: bytes
    pool: transfer.RemotePool


class DisconnectPeer(msgspec.Struct, frozen=True, tag=True):
    peer_id: str


class StartPull(msgspec.Struct, frozen=True, tag=True):
    """Pull a run into blocks that the sequence holds."""

    sequence_id: str
    pull: transfer.Pull


class StoreBytes(msgspec.Struct, frozen=True, tag=True):
    """Write bytes that came over gRPC; the frame after this message has them."""

    sequence_id: str
    block_ids: list[int]


class LoadBytes(msgspec.Struct, frozen=True, tag=True):
    """Send the bytes of blocks that a PREFILL_ONLY sequence holds; answered by `BlockData`."""

    request_id: int
    sequence_id: str
    block_ids: list[int]


class DescribeSource(msgspec.Struct, frozen=True, tag=True):
    """Ask for what a consumer needs to read from here; answered by `Producer`."""

    request_id: int


class CheckIntegrity(msgspec.Struct, frozen=True, tag=True):
    request_id: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


SequenceCommand = (
    Add | StartLocalPrefill | Restart | Commit | ContinuePrefill | Remove | ReturnWaiting
)
ChainCommand = PinPrefix | ImportBlocks | CommitImport
TransferCommand = ConnectPeer | DisconnectPeer | StartPull | StoreBytes
Question = (
    ListChains
    | ListBlocks
    | ResetPrefixCache
    | KeepChain
    | LoadBytes
    | DescribeSource
    | CheckIntegrity
)
Command = SequenceCommand | ChainCommand | TransferCommand | Question | Shutdown

# After these a read must not land in the sequence's blocks any more.
ENDS_OF_PULLS = (Commit, CommitImport, ContinuePrefill, Remove, Restart)


def sequence_id(command: Command) -> str:
    """Returns the id of the sequence that a command is about; empty if it is about none."""
    if isinstance(command, Add | Restart):
        return command.spec.sequence_id
    return str(getattr(command, "sequence_id", ""))


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is loaded; sent once, first."""

    model_fingerprint: str
    compute_dtype: str
    numerics: str
    kv_dtype: str
    layout: str
    num_blocks: int
    spans: BlockSpans
    max_model_len: int
    rates: WorkerRates  # before a step
    load_ms: dict[str, float]  # where the time to load went
    pool_is_shared: bool = False  # it lies in the memfd of the settings


class Report(msgspec.Struct, frozen=True, tag=True):
    """The engine's news of one turn. `tick` counts turns with and without a step, so it stands
    still only when the engine hangs."""

    tick: int
    report: StepReport
    num_commands: int = 0  # applied before it, since the start


class BlocksFinal(msgspec.Struct, frozen=True, tag=True):
    """Blocks that consumers may pull from now on, sent while their step goes on. All else of the
    step comes in its `Report`."""

    final_blocks: list[FinalBlocks]


class PullsSettled(msgspec.Struct, frozen=True, tag=True):
    results: list[transfer.PullResult]


class BlockData(msgspec.Struct, frozen=True, tag=True):
    """The answer to `LoadBytes`. The frame after it has the bytes, unless there is an `error`."""

    request_id: int
    error: str


class Chains(msgspec.Struct, frozen=True, tag=True):
    request_id: int
    chains: list[list[bytes]]  # block hashes, each chain from its root on


class Blocks(msgspec.Struct, frozen=True, tag=True):
    request_id: int
    hashes: list[bytes]


class PrefixCacheReset(msgspec.Struct, frozen=True, tag=True):
    request_id: int
    num_blocks: int  # that were dropped


class ChainKept(msgspec.Struct, frozen=True, tag=True):
    request_id: int
    kept: Kept


class Integrity(msgspec.Struct, frozen=True, tag=True):
    request_id: int
    message: str  # empty: all pools whole


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot go on; the worker exits with this message."""

    message: str
    code: str = ""  # of services/tandem/errors.py, where it is one of its errors


class Loading(msgspec.Struct, frozen=True, tag=True):
    """The progress of the load; comes before `Ready`."""

    num_bytes: int  # of the files of its weights
    num_bytes_all: int


TransferReply = PullsSettled | transfer.Renewed | transfer.Broken
Event = Report | BlocksFinal | TransferReply  # that nobody asked for
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
Reply = Loading | Ready | Event | Answer | Fatal
