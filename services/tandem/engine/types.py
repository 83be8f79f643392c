"""Types of an engine's input and of a step's output: plain data that also travels by msgspec.

A sequence on an engine is in one of three modes, named by who computes its prompt:

    LOCAL                  this engine prefills and decodes it
    WAITING_FOR_REMOTE_KV  blocks for the whole prompt are reserved, reported (`Reserved`), filled
                           from outside, until `commit` or `start_local_prefill` or `restart`
    PREFILL_ONLY           this engine prefills it, reports blocks as they become final
                           (`FinalBlocks`) and the first token (`Prefilled`), and holds every block
                           until `remove`

LOCAL and PREFILL_ONLY with `prefix_blocks` that are not all cached wait first, as
WAITING_FOR_REMOTE_KV does, until `continue_prefill` says how many of them came from outside.
Chains of blocks without tokens, which are held for a consumer (`FinalBlocks`, `Held`) or imported
from a peer (`Reserved`), are in peer_blocks.py.
"""

from collections.abc import Callable
from enum import Enum

import msgspec

from tandem.common.adapter import Adapter
from tandem.common.cached_tokens import NONE_CACHED, CachedTokens
from tandem.common.kv_budget import KvBudget
from tandem.common.perf_model.rates import WorkerRates
from tandem.common.perf_model.soonest import Offer, Producer
from tandem.common.retention import NO_RETENTION, Retention
from tandem.common.sampling_params import SamplingParams
from tandem.common.worker_load import WorkerLoad


class Mode(Enum):
    LOCAL = "here"
    WAITING_FOR_REMOTE_KV = "await_kv"
    PREFILL_ONLY = "for_peer"


class SequenceSpec(msgspec.Struct, frozen=True):
    """A sequence to run. `token_ids` is the prompt, then any tokens made elsewhere before."""

    sequence_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    mode: Mode
    # Resolved. Its `max_tokens` counts completion tokens that token_ids has already. A token of its
    # `stop_token_ids` ends the sequence and is its last token. Log probabilities of the prompt come
    # with the first token, and are computed anew: cached blocks have no logits.
    sampling: SamplingParams
    cache_salt: bytes = b""
    adapter: Adapter | None = None  # that computes it; None: the base model alone
    # WAITING_FOR_REMOTE_KV: with fewer tokens missing, prefill here at once.
    remote_prefill_min_tokens: int = 0
    first_wanted_block: int = 0  # PREFILL_ONLY: blocks before it are not reported
    embed: bool = False  # report the hidden state of the prompt's last token, with the first token
    grammar: str = ""  # of the completion, as llguidance reads it; empty: any text
    # A sequence here that has the same first tokens: what of its half-filled block they share is
    # copied at admission, if only one token is left to compute then. Else it changes nothing.
    fork_of: str = ""
    prefix_blocks: int = 0  # LOCAL, PREFILL_ONLY: so many first blocks are to come from a peer
    offer: Offer | None = None  # of a peer, for a prompt that may await its first blocks
    # WAITING_FOR_REMOTE_KV: the peer that would have its KV soonest; None: it waits for one anyway.
    producer: Producer | None = None
    # PREFILL_ONLY: latency_s, bytes_per_s of its pulls.
    consumer_rate: tuple[float, float] | None = None
    retention: Retention = NO_RETENTION  # of its KV after its end
    # Its tokens see so much KV; it is shared with no other sequence. None: all KV.
    kv_budget: KvBudget | None = None
    # Of time.monotonic(), the same clock in all processes of a machine: a first token that would
    # come later is of no use, so the sequence is refused before anything is computed. 0: none is.
    first_token_by: float = 0.0


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural log probabilities of a token and of the most likely ones at its place, by the model's
    own logits: before temperature, filters and edits."""

    logprob: float
    rank: int  # 1: no token is more likely
    top_ids: list[int]  # the most likely first
    top_logprobs: list[float]


class Admitted(msgspec.Struct, frozen=True):
    """A sequence left the queue: it has its blocks."""

    sequence_id: str
    at: float  # time.monotonic(), the same clock in all processes of a machine
    shared_wait_s: float = 0.0  # in the queue, for blocks that another sequence computed or pulled


class Reserved(msgspec.Struct, frozen=True):
    """A sequence has all its blocks and waits for KV from outside; or so does an imported chain."""

    sequence_id: str
    num_cached_tokens: int  # a multiple of the block size
    block_ids: list[int]  # to be filled, in the order in which blocks travel (transfer_order.py)
    cached: CachedTokens = NONE_CACHED  # of a sequence, at its first admission


class FinalBlocks(msgspec.Struct, frozen=True):
    """Blocks of a PREFILL_ONLY sequence or a held chain that will not change any more, in order,
    without gaps."""

    sequence_id: str
    first_block: int  # its number in the order in which blocks travel (transfer_order.py)
    block_ids: list[int]


OnFinal = Callable[[list[FinalBlocks]], object]


class Prefilled(msgspec.Struct, frozen=True):
    """A PREFILL_ONLY sequence is computed whole; this is the token that follows it."""

    sequence_id: str
    first_token_id: int
    cached: CachedTokens = NONE_CACHED  # of token_ids
    logprobs: TokenLogprobs | None = None  # of the first token
    prompt_logprobs: list[TokenLogprobs] = []  # of the prompt from its second token on
    embedding: list[float] = []  # of the prompt, if it was asked for
    block_sums: list[float] = []  # weights that its blocks attracted, if its KV budget counts them

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that were not computed for it."""
        return self.cached.total


class Held(msgspec.Struct, frozen=True):
    """Tells that a chain's first `num_blocks` blocks are here, and stay until `remove`."""

    sequence_id: str
    num_blocks: int


class NewTokens(msgspec.Struct, frozen=True):
    """Tokens that a decoding sequence made in this step, and its end if this step ended it."""

    sequence_id: str
    token_ids: list[int]
    finish_reason: str = ""  # "", "stop" or "length"
    cached: CachedTokens = NONE_CACHED  # of the prompt
    num_preemptions: int = 0
    logprobs: list[TokenLogprobs] = []  # of token_ids, one each, if they were asked for
    prompt_logprobs: list[TokenLogprobs] = []  # with the first token: as Prefilled has them
    embedding: list[float] = []  # the same

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed for it."""
        return self.cached.total


class Failed(msgspec.Struct, frozen=True):
    """A sequence that ended without an answer; `code` is one of services/tandem/errors.py."""

    sequence_id: str
    code: str
    message: str
    retry_after_s: float = 0.0


class AdapterStats(msgspec.Struct, frozen=True):
    """The LoRA adapters of an engine: names of those that its sequences want, and digests of those
    in memory or not to be read."""

    running: list[str] = []  # of sequences that have blocks
    waiting: list[str] = []
    loaded: list[str] = []
    failed: list[str] = []


class TierStats(msgspec.Struct, frozen=True):
    """A tier below the pool: the blocks that it holds, and what it has done since the start."""

    name: str  # the name of one of KV_TIERS
    blocks_total: int
    blocks_held: int
    blocks_written: int
    blocks_loaded: int
    blocks_bad: int  # could not be read back as they were written, or were left out at the start
    write_failures: int
    block_s: float = 0.0  # to load a block; 0: not measured


class PinStats(msgspec.Struct, frozen=True):
    """The pins of a place, once there were any."""

    place: str  # device, or the name of one of KV_TIERS
    blocks: int  # that are pinned now
    fates: dict[str, int] = {}  # blocks since the start, by what became of their pins


class EngineStats(msgspec.Struct, frozen=True):
    """The state of an engine that is not part of its load: only its own worker reads it."""

    blocks_free: int = 0
    blocks_leaving: int = 0  # blocks that only a tier still reads or writes
    blocks_dropped: int = 0  # since the start: evicted without a copy in a tier
    adapters: AdapterStats = AdapterStats()
    tiers: list[TierStats] = []
    load_queue_s: float = 0.0  # seconds until the current loads from tiers have ended
    pins: list[PinStats] = []


class StoredBlock(msgspec.Struct, frozen=True):
    parent_hash: bytes
    block_hash: bytes
    # With `report_block_tokens` only, and not of blocks that were imported by their hashes.
    token_ids: list[int] = []
    index: int = 0  # of the block in its chain
    adapter: Adapter | None = None  # that its KV is of, where token ids are known


class TierBlocks(msgspec.Struct, frozen=True):
    """Net changes of the blocks that can be read from a tier."""

    tier: str  # its name
    stored: list[StoredBlock]  # parents before children
    removed: list[bytes]  # children before parents, but those that could not be read


class BlockChanges(msgspec.Struct, frozen=True):
    """Net changes of a set of blocks."""

    stored: list[StoredBlock]  # parents before children
    removed: list[bytes]  # children before parents


class StepReport(msgspec.Struct):
    """Everything that happened since the report before; one message between the processes."""

    step: int = 0
    step_ms: float = 0.0
    num_prefill_tokens: int = 0
    num_prefill_context_tokens: int = 0  # tokens before each of those, summed
    num_decode_tokens: int = 0
    num_decode_context_tokens: int = 0
    admitted: list[Admitted] = []
    reserved: list[Reserved] = []
    final_blocks: list[FinalBlocks] = []
    prefilled: list[Prefilled] = []
    held: list[Held] = []
    new_tokens: list[NewTokens] = []
    failed: list[Failed] = []
    stored: list[StoredBlock] = []  # parents before children
    removed: list[bytes] = []  # children before parents
    chains: BlockChanges | None = None  # of KV events, where `stored` and `removed` have no chains
    tiers: list[TierBlocks] = []  # of those where something changed
    load: WorkerLoad = WorkerLoad()
    stats: EngineStats = EngineStats()
    rates: WorkerRates | None = None  # as measured so far; None: nothing was computed
