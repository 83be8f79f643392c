"""The input of an engine and the output of its steps: plain data that is encoded by msgspec.

A sequence on an engine has one of three modes:

    LOCAL                  This engine prefills and decodes the sequence.
    WAITING_FOR_REMOTE_KV  A peer prefills the sequence, and this engine decodes it. The engine
                           reserves blocks for the whole prompt and reports them (`Reserved`). They
                           are filled by a pull, which ends with `commit`; if the pull fails, the
                           caller uses `start_local_prefill` or `restart`.
    PREFILL_ONLY           This engine prefills the sequence for a peer. It reports blocks as they
                           become final (`FinalBlocks`) and then the first token (`Prefilled`), and
                           holds every block until `remove`.

A LOCAL or PREFILL_ONLY sequence whose `prefix_blocks` are not all cached waits first until they are
pulled from a peer. The caller then calls `continue_prefill` with the number of blocks that have KV.

peer_blocks.py handles chains of blocks that are known by their hashes only: chains held for a
consumer (`FinalBlocks`, `Held`) and chains imported from a peer (`Reserved`).
"""

from collections.abc import Callable
from enum import Enum

import msgspec

from tandem.common.adapter import Adapter
from tandem.common.cached_tokens import NONE_CACHED, CachedTokens
from tandem.common.kv_budget import KvBudget
from tandem.common.perf_model.rates import WorkerRates
from tandem.common.perf_model.soonest import Offer, Producer
from tandem.common.prompt_image import PromptImage
from tandem.common.retention import NO_RETENTION, Retention
from tandem.common.sampling_params import SamplingParams
from tandem.common.speculation import Speculated, SpeculationStats
from tandem.common.worker_load import WorkerLoad


class Mode(Enum):
    LOCAL = "here"
    WAITING_FOR_REMOTE_KV = "await_kv"
    PREFILL_ONLY = "for_peer"


class SequenceSpec(msgspec.Struct, frozen=True):
    """A sequence to run. `token_ids` has the prompt and then the output tokens generated so far."""

    sequence_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    mode: Mode
    # The request's sampling parameters in the form for an engine (`SamplingParams.resolved`).
    # `max_tokens` limits all output tokens, including those that `token_ids` already has. A token
    # in `stop_token_ids` ends the sequence as its last token. With `prompt_logprobs` the whole
    # prompt is computed, because cached blocks have no logits.
    sampling: SamplingParams
    cache_salt: bytes = b""
    adapter: Adapter | None = None  # the LoRA adapter; None: the base model alone
    images: tuple[PromptImage, ...] = ()  # the prompt's images, in the order of their tokens
    # WAITING_FOR_REMOTE_KV: the sequence waits for a peer if at least this number of tokens is
    # missing. Otherwise this engine prefills the missing tokens.
    remote_prefill_min_tokens: int = 0
    first_wanted_block: int = 0  # PREFILL_ONLY: index of the first block that the consumer needs
    # True: the hidden state of the prompt's last token is reported with the first token.
    embed: bool = False
    grammar: str = ""  # grammar of the completion, in the format of llguidance; empty: any text
    # Id of the parent, if this sequence is to become a fork of another sequence on this engine
    # (sequence.py). The parent must already have the KV of all tokens of this sequence except the
    # last; otherwise this sequence starts without a fork. Empty: no parent.
    fork_of: str = ""
    # True: a line of a batch. Other sequences are computed and admitted first, and chunks of its
    # prompt are small, so that it hardly delays them.
    is_batch: bool = False
    # Number of leading tokens of the prompt that other chats with its system prompt and tools have,
    # too. The states after them are frozen. 0: unknown.
    system_tokens: int = 0
    # LOCAL, PREFILL_ONLY: number of leading blocks to pull from a peer if they are not cached.
    prefix_blocks: int = 0
    # How many of the prompt's first blocks a peer has, and how fast they can be pulled. None:
    # unknown.
    offer: Offer | None = None
    # WAITING_FOR_REMOTE_KV: speed of the peer that prefills. The engine compares the peer's
    # predicted time with other ways to get the KV (perf_model/soonest.py). None: there is no
    # prediction, and the sequence waits for the peer.
    producer: Producer | None = None
    # PREFILL_ONLY: speed of the consumer's pulls as (latency in seconds, bytes per second).
    consumer_rate: tuple[float, float] | None = None
    retention: Retention = NO_RETENTION  # how the KV is kept after the sequence ends
    # Limit on the KV that each token attends to; None: no limit. The blocks of a sequence with a
    # limit are never shared.
    kv_budget: KvBudget | None = None
    # Deadline of the first token, as a value of time.monotonic(), which is the same clock in all
    # processes of a machine. A sequence that is predicted to miss the deadline is refused before it
    # is computed. 0: no deadline.
    first_token_by: float = 0.0


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural log probabilities of a token and of the most likely tokens at its position.

    All log probabilities are computed from the model's logits, before temperature, filters and
    edits.
    """

    logprob: float
    rank: int  # rank of the token by probability; 1: no token is more likely
    top_ids: list[int]  # ids of the most likely tokens, in descending order of probability
    top_logprobs: list[float]


class Admitted(msgspec.Struct, frozen=True):
    """A sequence left the queue, because its blocks were allocated."""

    sequence_id: str
    at: float  # time of the admission by time.monotonic(), which all processes of a machine share
    # seconds for which the sequence waited for blocks that another sequence computed or pulled
    shared_wait_s: float = 0.0
    tokens_ahead: int = 0  # number of prompt tokens that were still missing when it arrived


class Reserved(msgspec.Struct, frozen=True):
    """A sequence or an imported chain has its blocks, and waits for a pull to fill them."""

    sequence_id: str
    num_cached_tokens: int  # a multiple of the block size
    block_ids: list[int]  # the blocks to fill, in transfer order (transfer_order.py)
    cached: CachedTokens = NONE_CACHED  # tokens whose KV the sequence reused at its first admission


class FinalBlocks(msgspec.Struct, frozen=True):
    """Blocks of a PREFILL_ONLY sequence or of a held chain that will not change any more, so the
    peer can pull them."""

    sequence_id: str
    first_block: int  # position of the first of these blocks in transfer order (transfer_order.py)
    block_ids: list[int]


OnFinal = Callable[[list[FinalBlocks]], object]


class Prefilled(msgspec.Struct, frozen=True):
    """All tokens of a PREFILL_ONLY sequence are computed, and the next token is sampled."""

    sequence_id: str
    first_token_id: int  # the sampled token
    cached: CachedTokens = NONE_CACHED  # tokens of the sequence whose KV was reused
    logprobs: TokenLogprobs | None = None  # log probabilities for `first_token_id`
    prompt_logprobs: list[TokenLogprobs] = []  # one item per prompt token after the first
    embedding: list[float] = []  # embedding of the prompt, if the spec has `embed`
    # For each block, the sum of the attention weights that it received. Empty if the spec has no KV
    # budget that keeps heavy hitters.
    block_sums: list[float] = []

    @property
    def num_cached_tokens(self) -> int:
        """Number of the sequence's tokens whose KV was reused instead of computed."""
        return self.cached.total


class Held(msgspec.Struct, frozen=True):
    """The first `num_blocks` blocks of a chain are held for a consumer until `remove`."""

    sequence_id: str
    num_blocks: int


class NewTokens(msgspec.Struct, frozen=True):
    """New output tokens of a decoding sequence. If the sequence ended, also says why."""

    sequence_id: str
    token_ids: list[int]
    finish_reason: str = ""  # "": the sequence has not ended; "stop" or "length": why it ended
    cached: CachedTokens = NONE_CACHED  # tokens of the prompt whose KV was reused
    num_preemptions: int = 0
    logprobs: list[TokenLogprobs] = []  # one item for each of `token_ids`, if requested
    # One item per prompt token after the first. Empty except with the first output token.
    prompt_logprobs: list[TokenLogprobs] = []
    embedding: list[float] = []  # embedding of the prompt; empty except with the first output token
    speculated: Speculated | None = None  # None: the sequence does not speculate

    @property
    def num_cached_tokens(self) -> int:
        """Number of the prompt's tokens whose KV was reused instead of computed."""
        return self.cached.total


class Failed(msgspec.Struct, frozen=True):
    """A sequence ended with an error. `code` is the code of a class in tandem/errors.py."""

    sequence_id: str
    code: str
    message: str
    retry_after_s: float = 0.0


class AdapterStats(msgspec.Struct, frozen=True):
    """The LoRA adapters of an engine."""

    running: list[str] = []  # names of the adapters of sequences that have blocks
    waiting: list[str] = []  # names of the adapters of sequences that wait for blocks
    loaded: list[str] = []  # digests of the adapters in memory
    failed: list[str] = []  # digests of the adapters that could not be read recently


class TierStats(msgspec.Struct, frozen=True):
    """The number of blocks that a tier below the pool holds now, and counts since the start of the
    process."""

    name: str  # name of the tier, from KV_TIERS
    blocks_total: int
    blocks_held: int
    blocks_written: int
    blocks_loaded: int
    # Number of copies that could not be read, or that could not be recovered at the tier's start.
    blocks_bad: int
    write_failures: int
    block_s: float = 0.0  # seconds to load a block; 0: not measured


class PinStats(msgspec.Struct, frozen=True):
    """The pinned blocks of the KV pools or of one tier."""

    place: str  # "device" for the KV pools, or the name of the tier
    blocks: int  # number of blocks that are pinned now
    fates: dict[str, int] = {}  # `Fate` of a pin -> number of blocks since the start


class PeerLoadStats(msgspec.Struct, frozen=True):
    """The loads from tiers for peers that pull blocks from this engine, since its start."""

    # Result -> number of loads. "loaded", "failed" (a block could not be read), "given_up" (the
    # load took too long), "cancelled" (the peer has left), "too_slow" or "no_room" (not begun)
    results: dict[str, int] = {}
    seconds: float = 0.0  # from the peers' requests to the end of their loads
    blocks: int = 0  # number of loaded blocks


class EngineStats(msgspec.Struct, frozen=True):
    """State of an engine for the metrics of its worker. Routers get the `WorkerLoad` only."""

    blocks_free: int = 0
    blocks_leaving: int = 0  # blocks that no sequence uses, but that a tier still reads or writes
    blocks_dropped: int = 0  # blocks that were evicted without a copy in a tier, since the start
    adapters: AdapterStats = AdapterStats()
    tiers: list[TierStats] = []
    load_queue_s: float = 0.0  # expected seconds until the current loads from tiers have ended
    pins: list[PinStats] = []
    speculation: SpeculationStats | None = None  # None: the engine does not speculate
    peer_loads: PeerLoadStats = PeerLoadStats()


class StoredBlock(msgspec.Struct, frozen=True):
    parent_hash: bytes
    block_hash: bytes
    # Tokens of the block. Empty if the setting `report_block_tokens` is off. Also empty for blocks
    # imported from a peer, which sends only hashes.
    token_ids: list[int] = []
    index: int = 0  # index of the block in its chain
    adapter: Adapter | None = None  # LoRA adapter of the KV, if `token_ids` are known


class TierBlocks(msgspec.Struct, frozen=True):
    """The blocks that became loadable from a tier, or stopped being so, since the last report."""

    tier: str  # name of the tier
    stored: list[StoredBlock]  # parents before children
    removed: list[bytes]  # children before parents; unreadable blocks in any order


class BlockChanges(msgspec.Struct, frozen=True):
    """The blocks that joined or left a set of blocks since the last report."""

    stored: list[StoredBlock]  # parents before children
    removed: list[bytes]  # children before parents


class StepReport(msgspec.Struct):
    """Everything that happened since the previous report. The engine process sends it as one
    message to the I/O process."""

    step: int = 0
    step_ms: float = 0.0
    num_prefill_tokens: int = 0
    # Sum, over the prefilled tokens, of the number of tokens before each in its sequence. It
    # measures the attention work: 3 tokens after 10 others give 10 + 11 + 12 = 33.
    num_prefill_context_tokens: int = 0
    num_decode_tokens: int = 0
    # Sum, over the decoded tokens, of the number of tokens before each in its sequence.
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
    # Models with sliding windows: the changes to publish as KV events, instead of `stored` and
    # `removed`. Those two may list a block without the blocks before it in the sequence.
    chains: BlockChanges | None = None
    tiers: list[TierBlocks] = []  # the tiers whose blocks changed
    load: WorkerLoad = WorkerLoad()
    stats: EngineStats = EngineStats()
    rates: WorkerRates | None = None  # rates measured so far; None: this step computed nothing
