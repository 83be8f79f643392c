from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenRun(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens", "bad_words", "logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenRun]
    logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., bad_words: _Optional[_Iterable[_Union[TokenRun, _Mapping]]] = ..., logprobs: _Optional[int] = ...) -> None: ...

class PrefillCandidate(_message.Message):
    __slots__ = ("worker_id", "epoch", "address", "cached_blocks", "loaded_blocks", "load_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: str
    address: str
    cached_blocks: int
    loaded_blocks: int
    load_s: float
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[str] = ..., address: _Optional[str] = ..., cached_blocks: _Optional[int] = ..., loaded_blocks: _Optional[int] = ..., load_s: _Optional[float] = ...) -> None: ...

class PrefixHolder(_message.Message):
    __slots__ = ("worker_id", "epoch", "address", "num_blocks", "load_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: str
    address: str
    num_blocks: int
    load_s: float
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[str] = ..., address: _Optional[str] = ..., num_blocks: _Optional[int] = ..., load_s: _Optional[float] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "digest", "path", "rank", "added_at")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADDED_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    path: str
    rank: int
    added_at: float
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., path: _Optional[str] = ..., rank: _Optional[int] = ..., added_at: _Optional[float] = ...) -> None: ...

class Retention(_message.Message):
    __slots__ = ("returns", "pin_s", "weight", "num_tokens", "priority")
    RETURNS_FIELD_NUMBER: _ClassVar[int]
    PIN_S_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    returns: bool
    pin_s: float
    weight: int
    num_tokens: int
    priority: int
    def __init__(self, returns: bool = ..., pin_s: _Optional[float] = ..., weight: _Optional[int] = ..., num_tokens: _Optional[int] = ..., priority: _Optional[int] = ...) -> None: ...

class SequenceInput(_message.Message):
    __slots__ = ("token_ids", "num_prompt_tokens", "sampling", "max_tokens", "stop_token_ids", "cache_salt", "prompt_logprobs", "grammar", "embed", "adapter", "retention", "kv_budget", "system_tokens", "images", "is_batch")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    EMBED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    KV_BUDGET_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    IS_BATCH_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: Sampling
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: bytes
    prompt_logprobs: int
    grammar: str
    embed: bool
    adapter: Adapter
    retention: Retention
    kv_budget: SequenceKvBudget
    system_tokens: int
    images: _containers.RepeatedCompositeFieldContainer[PromptImage]
    is_batch: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[bytes] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[str] = ..., embed: bool = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., retention: _Optional[_Union[Retention, _Mapping]] = ..., kv_budget: _Optional[_Union[SequenceKvBudget, _Mapping]] = ..., system_tokens: _Optional[int] = ..., images: _Optional[_Iterable[_Union[PromptImage, _Mapping]]] = ..., is_batch: bool = ...) -> None: ...

class PromptImage(_message.Message):
    __slots__ = ("digest", "data", "starts", "run_length")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    RUN_LENGTH_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    data: bytes
    starts: _containers.RepeatedScalarFieldContainer[int]
    run_length: int
    def __init__(self, digest: _Optional[bytes] = ..., data: _Optional[bytes] = ..., starts: _Optional[_Iterable[int]] = ..., run_length: _Optional[int] = ...) -> None: ...

class SequenceKvBudget(_message.Message):
    __slots__ = ("policy", "tokens", "sinks")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SINKS_FIELD_NUMBER: _ClassVar[int]
    policy: str
    tokens: int
    sinks: int
    def __init__(self, policy: _Optional[str] = ..., tokens: _Optional[int] = ..., sinks: _Optional[int] = ...) -> None: ...

class TraceContext(_message.Message):
    __slots__ = ("traceparent", "tracestate")
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    traceparent: str
    tracestate: str
    def __init__(self, traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class SubmitSequence(_message.Message):
    __slots__ = ("request_id", "attempt", "input", "prefill_candidates", "prefix_holders", "trace", "losses_max", "fork_of", "first_token_s", "may_return", "sent_at_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HOLDERS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    LOSSES_MAX_FIELD_NUMBER: _ClassVar[int]
    FORK_OF_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    MAY_RETURN_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    input: SequenceInput
    prefill_candidates: _containers.RepeatedCompositeFieldContainer[PrefillCandidate]
    prefix_holders: _containers.RepeatedCompositeFieldContainer[PrefixHolder]
    trace: TraceContext
    losses_max: int
    fork_of: str
    first_token_s: float
    may_return: bool
    sent_at_s: float
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., input: _Optional[_Union[SequenceInput, _Mapping]] = ..., prefill_candidates: _Optional[_Iterable[_Union[PrefillCandidate, _Mapping]]] = ..., prefix_holders: _Optional[_Iterable[_Union[PrefixHolder, _Mapping]]] = ..., trace: _Optional[_Union[TraceContext, _Mapping]] = ..., losses_max: _Optional[int] = ..., fork_of: _Optional[str] = ..., first_token_s: _Optional[float] = ..., may_return: bool = ..., sent_at_s: _Optional[float] = ...) -> None: ...

class CancelSequence(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ReturnWaiting(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class DecodeCommand(_message.Message):
    __slots__ = ("submit", "cancel", "return_waiting")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RETURN_WAITING_FIELD_NUMBER: _ClassVar[int]
    submit: SubmitSequence
    cancel: CancelSequence
    return_waiting: ReturnWaiting
    def __init__(self, submit: _Optional[_Union[SubmitSequence, _Mapping]] = ..., cancel: _Optional[_Union[CancelSequence, _Mapping]] = ..., return_waiting: _Optional[_Union[ReturnWaiting, _Mapping]] = ...) -> None: ...

class SequenceTimings(_message.Message):
    __slots__ = ("queue_ms", "prefill_ms", "transfer_exposed_ms", "blocks_pulled", "bytes_pulled", "prefill_worker_id", "transport", "blocks_skipped", "transfer_ms", "second_token_ms", "shared_wait_ms", "prefill_queue_ms", "tokens_ahead", "local_prefill_ms", "remote_prefill_ms", "tokens_proposed", "tokens_accepted", "speculation_saved_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_EXPOSED_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PULLED_FIELD_NUMBER: _ClassVar[int]
    BYTES_PULLED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    SECOND_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    SHARED_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PROPOSED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_SAVED_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    prefill_ms: float
    transfer_exposed_ms: float
    blocks_pulled: int
    bytes_pulled: int
    prefill_worker_id: str
    transport: str
    blocks_skipped: int
    transfer_ms: float
    second_token_ms: float
    shared_wait_ms: float
    prefill_queue_ms: float
    tokens_ahead: int
    local_prefill_ms: float
    remote_prefill_ms: float
    tokens_proposed: int
    tokens_accepted: int
    speculation_saved_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., transfer_exposed_ms: _Optional[float] = ..., blocks_pulled: _Optional[int] = ..., bytes_pulled: _Optional[int] = ..., prefill_worker_id: _Optional[str] = ..., transport: _Optional[str] = ..., blocks_skipped: _Optional[int] = ..., transfer_ms: _Optional[float] = ..., second_token_ms: _Optional[float] = ..., shared_wait_ms: _Optional[float] = ..., prefill_queue_ms: _Optional[float] = ..., tokens_ahead: _Optional[int] = ..., local_prefill_ms: _Optional[float] = ..., remote_prefill_ms: _Optional[float] = ..., tokens_proposed: _Optional[int] = ..., tokens_accepted: _Optional[int] = ..., speculation_saved_ms: _Optional[float] = ...) -> None: ...

class CachedTokens(_message.Message):
    __slots__ = ("device", "host", "disk", "peer", "store")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    device: int
    host: int
    disk: int
    peer: int
    store: int
    def __init__(self, device: _Optional[int] = ..., host: _Optional[int] = ..., disk: _Optional[int] = ..., peer: _Optional[int] = ..., store: _Optional[int] = ...) -> None: ...

class LogprobEntry(_message.Message):
    __slots__ = ("logprob", "rank", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    rank: int
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class SequenceUpdate(_message.Message):
    __slots__ = ("request_id", "attempt", "token_ids", "finish_reason", "error", "cached_tokens", "timings", "num_preemptions", "workers_lost", "logprobs", "prompt_logprobs", "is_committed", "is_admitted", "embedding", "cached_by_tier")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_LOST_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    IS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    IS_ADMITTED_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    CACHED_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: str
    error: WorkerError
    cached_tokens: int
    timings: SequenceTimings
    num_preemptions: int
    workers_lost: int
    logprobs: _containers.RepeatedCompositeFieldContainer[LogprobEntry]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[LogprobEntry]
    is_committed: bool
    is_admitted: bool
    embedding: _containers.RepeatedScalarFieldContainer[float]
    cached_by_tier: CachedTokens
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[str] = ..., error: _Optional[_Union[WorkerError, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., timings: _Optional[_Union[SequenceTimings, _Mapping]] = ..., num_preemptions: _Optional[int] = ..., workers_lost: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[LogprobEntry, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[LogprobEntry, _Mapping]]] = ..., is_committed: bool = ..., is_admitted: bool = ..., embedding: _Optional[_Iterable[float]] = ..., cached_by_tier: _Optional[_Union[CachedTokens, _Mapping]] = ...) -> None: ...

class WorkerError(_message.Message):
    __slots__ = ("code", "message", "retry_after_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retry_after_s: float
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class KvGroupLoad(_message.Message):
    __slots__ = ("blocks_total", "blocks_used", "sequence_blocks_max")
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_BLOCKS_MAX_FIELD_NUMBER: _ClassVar[int]
    blocks_total: int
    blocks_used: int
    sequence_blocks_max: int
    def __init__(self, blocks_total: _Optional[int] = ..., blocks_used: _Optional[int] = ..., sequence_blocks_max: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "queue_max", "queued_tokens", "blocks_total", "blocks_used", "blocks_cached", "blocks_quarantined", "num_leases", "step", "num_pulls", "tokens_wasted", "num_running_slots", "chunk_tokens", "groups", "queued_s", "num_prefilling", "num_lines")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MAX_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_PULLS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_WASTED_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_SLOTS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILLING_FIELD_NUMBER: _ClassVar[int]
    NUM_LINES_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    queue_max: int
    queued_tokens: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    blocks_quarantined: int
    num_leases: int
    step: int
    num_pulls: int
    tokens_wasted: int
    num_running_slots: int
    chunk_tokens: int
    groups: _containers.RepeatedCompositeFieldContainer[KvGroupLoad]
    queued_s: float
    num_prefilling: int
    num_lines: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., queue_max: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_used: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., blocks_quarantined: _Optional[int] = ..., num_leases: _Optional[int] = ..., step: _Optional[int] = ..., num_pulls: _Optional[int] = ..., tokens_wasted: _Optional[int] = ..., num_running_slots: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[KvGroupLoad, _Mapping]]] = ..., queued_s: _Optional[float] = ..., num_prefilling: _Optional[int] = ..., num_lines: _Optional[int] = ...) -> None: ...

class DecodeUpdate(_message.Message):
    __slots__ = ("sequences", "load", "num_submits", "draining")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    NUM_SUBMITS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceUpdate]
    load: WorkerLoad
    num_submits: int
    draining: bool
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceUpdate, _Mapping]]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., num_submits: _Optional[int] = ..., draining: bool = ...) -> None: ...

class StartPrefill(_message.Message):
    __slots__ = ("lease_id", "request_id", "input", "first_missing_block", "consumer_worker_id", "transport", "rate", "prefix_holders", "verify_every", "trace", "first_token_s", "sent_at_s")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    FIRST_MISSING_BLOCK_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HOLDERS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_EVERY_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_S_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    request_id: str
    input: SequenceInput
    first_missing_block: int
    consumer_worker_id: str
    transport: str
    rate: PairRate
    prefix_holders: _containers.RepeatedCompositeFieldContainer[PrefixHolder]
    verify_every: int
    trace: TraceContext
    first_token_s: float
    sent_at_s: float
    def __init__(self, lease_id: _Optional[str] = ..., request_id: _Optional[str] = ..., input: _Optional[_Union[SequenceInput, _Mapping]] = ..., first_missing_block: _Optional[int] = ..., consumer_worker_id: _Optional[str] = ..., transport: _Optional[str] = ..., rate: _Optional[_Union[PairRate, _Mapping]] = ..., prefix_holders: _Optional[_Iterable[_Union[PrefixHolder, _Mapping]]] = ..., verify_every: _Optional[int] = ..., trace: _Optional[_Union[TraceContext, _Mapping]] = ..., first_token_s: _Optional[float] = ..., sent_at_s: _Optional[float] = ...) -> None: ...

class HoldBlocks(_message.Message):
    __slots__ = ("lease_id", "block_hashes", "first_missing_block", "consumer_worker_id", "transport", "verify_every", "load_s_max")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    FIRST_MISSING_BLOCK_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    VERIFY_EVERY_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_MAX_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    first_missing_block: int
    consumer_worker_id: str
    transport: str
    verify_every: int
    load_s_max: float
    def __init__(self, lease_id: _Optional[str] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., first_missing_block: _Optional[int] = ..., consumer_worker_id: _Optional[str] = ..., transport: _Optional[str] = ..., verify_every: _Optional[int] = ..., load_s_max: _Optional[float] = ...) -> None: ...

class PairRate(_message.Message):
    __slots__ = ("latency_s", "bytes_per_s")
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    latency_s: float
    bytes_per_s: float
    def __init__(self, latency_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class ReleaseLease(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillCommand(_message.Message):
    __slots__ = ("start", "release", "hold")
    START_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    start: StartPrefill
    release: ReleaseLease
    hold: HoldBlocks
    def __init__(self, start: _Optional[_Union[StartPrefill, _Mapping]] = ..., release: _Optional[_Union[ReleaseLease, _Mapping]] = ..., hold: _Optional[_Union[HoldBlocks, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    def __init__(self, epoch: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("message", "wait_estimate_s", "code")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WAIT_ESTIMATE_S_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    message: str
    wait_estimate_s: float
    code: str
    def __init__(self, message: _Optional[str] = ..., wait_estimate_s: _Optional[float] = ..., code: _Optional[str] = ...) -> None: ...

class BlockRun(_message.Message):
    __slots__ = ("first_block", "block_ids", "checksums")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedCompositeFieldContainer[BlockChecksum]
    def __init__(self, first_block: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[_Union[BlockChecksum, _Mapping]]] = ...) -> None: ...

class BlockChecksum(_message.Message):
    __slots__ = ("index", "xxh3")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    XXH3_FIELD_NUMBER: _ClassVar[int]
    index: int
    xxh3: int
    def __init__(self, index: _Optional[int] = ..., xxh3: _Optional[int] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("first_token_id", "cached_tokens", "queue_ms", "logprobs", "prompt_logprobs", "embedding", "cached_by_tier", "shared_wait_ms", "block_sums", "tokens_ahead")
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    CACHED_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    SHARED_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SUMS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    first_token_id: int
    cached_tokens: int
    queue_ms: float
    logprobs: LogprobEntry
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[LogprobEntry]
    embedding: _containers.RepeatedScalarFieldContainer[float]
    cached_by_tier: CachedTokens
    shared_wait_ms: float
    block_sums: _containers.RepeatedScalarFieldContainer[float]
    tokens_ahead: int
    def __init__(self, first_token_id: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queue_ms: _Optional[float] = ..., logprobs: _Optional[_Union[LogprobEntry, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[LogprobEntry, _Mapping]]] = ..., embedding: _Optional[_Iterable[float]] = ..., cached_by_tier: _Optional[_Union[CachedTokens, _Mapping]] = ..., shared_wait_ms: _Optional[float] = ..., block_sums: _Optional[_Iterable[float]] = ..., tokens_ahead: _Optional[int] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class Released(_message.Message):
    __slots__ = ("epoch", "lease_id", "whole")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    lease_id: str
    whole: bool
    def __init__(self, epoch: _Optional[str] = ..., lease_id: _Optional[str] = ..., whole: bool = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("step", "turn_s_max")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TURN_S_MAX_FIELD_NUMBER: _ClassVar[int]
    step: int
    turn_s_max: float
    def __init__(self, step: _Optional[int] = ..., turn_s_max: _Optional[float] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("accepted", "refused", "run", "prefilled", "released", "heartbeat", "held")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    refused: Refused
    run: BlockRun
    prefilled: Prefilled
    released: Released
    heartbeat: Heartbeat
    held: Held
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., run: _Optional[_Union[BlockRun, _Mapping]] = ..., prefilled: _Optional[_Union[Prefilled, _Mapping]] = ..., released: _Optional[_Union[Released, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., held: _Optional[_Union[Held, _Mapping]] = ...) -> None: ...

class FetchBlocksRequest(_message.Message):
    __slots__ = ("lease_id", "block_ids")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_id: _Optional[str] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class BlockBytes(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class EncodeRequest(_message.Message):
    __slots__ = ("model_fingerprint", "digest", "data", "num_rows", "cache_salt")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    digest: bytes
    data: bytes
    num_rows: int
    cache_salt: bytes
    def __init__(self, model_fingerprint: _Optional[str] = ..., digest: _Optional[bytes] = ..., data: _Optional[bytes] = ..., num_rows: _Optional[int] = ..., cache_salt: _Optional[bytes] = ...) -> None: ...

class EncodedImage(_message.Message):
    __slots__ = ("model_fingerprint", "digest", "num_rows", "hidden_size", "dtype", "data")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    digest: bytes
    num_rows: int
    hidden_size: int
    dtype: str
    data: bytes
    def __init__(self, model_fingerprint: _Optional[str] = ..., digest: _Optional[bytes] = ..., num_rows: _Optional[int] = ..., hidden_size: _Optional[int] = ..., dtype: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...

class ListChainsRequest(_message.Message):
    __slots__ = ("blocks_max",)
    BLOCKS_MAX_FIELD_NUMBER: _ClassVar[int]
    blocks_max: int
    def __init__(self, blocks_max: _Optional[int] = ...) -> None: ...

class ListChainsResponse(_message.Message):
    __slots__ = ("chains",)
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    chains: _containers.RepeatedCompositeFieldContainer[BlockChain]
    def __init__(self, chains: _Optional[_Iterable[_Union[BlockChain, _Mapping]]] = ...) -> None: ...

class BlockChain(_message.Message):
    __slots__ = ("block_hashes",)
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ListBlocksRequest(_message.Message):
    __slots__ = ("first_bucket", "end_bucket", "tier")
    FIRST_BUCKET_FIELD_NUMBER: _ClassVar[int]
    END_BUCKET_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    first_bucket: int
    end_bucket: int
    tier: str
    def __init__(self, first_bucket: _Optional[int] = ..., end_bucket: _Optional[int] = ..., tier: _Optional[str] = ...) -> None: ...

class ListBlocksResponse(_message.Message):
    __slots__ = ("hashes",)
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    def __init__(self, hashes: _Optional[bytes] = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class ReadLogRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: str
    def __init__(self, after: _Optional[str] = ...) -> None: ...

class ReadLogResponse(_message.Message):
    __slots__ = ("text", "after")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    text: bytes
    after: str
    def __init__(self, text: _Optional[bytes] = ..., after: _Optional[str] = ...) -> None: ...

class KeepRequest(_message.Message):
    __slots__ = ("block_hashes", "cache_salt", "retention")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    cache_salt: bytes
    retention: Retention
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ..., cache_salt: _Optional[bytes] = ..., retention: _Optional[_Union[Retention, _Mapping]] = ...) -> None: ...

class KeepResponse(_message.Message):
    __slots__ = ("num_blocks", "reason")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    reason: str
    def __init__(self, num_blocks: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class DescribeAdapterRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class DescribeAdapterResponse(_message.Message):
    __slots__ = ("digest", "rank", "error")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    digest: str
    rank: int
    error: str
    def __init__(self, digest: _Optional[str] = ..., rank: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class AddAdapterRequest(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class AddAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RemoveAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvCompatibility(_message.Message):
    __slots__ = ("model_fingerprint", "compute_dtype", "numerics", "block_size", "kv_dtype", "layout", "hash_version", "protocol_version", "tensor_parallel")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    HASH_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    compute_dtype: str
    numerics: str
    block_size: int
    kv_dtype: str
    layout: str
    hash_version: int
    protocol_version: int
    tensor_parallel: int
    def __init__(self, model_fingerprint: _Optional[str] = ..., compute_dtype: _Optional[str] = ..., numerics: _Optional[str] = ..., block_size: _Optional[int] = ..., kv_dtype: _Optional[str] = ..., layout: _Optional[str] = ..., hash_version: _Optional[int] = ..., protocol_version: _Optional[int] = ..., tensor_parallel: _Optional[int] = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("worker_id", "epoch", "compatibility", "transports", "host")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: str
    compatibility: KvCompatibility
    transports: _containers.RepeatedScalarFieldContainer[str]
    host: HostIdentity
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[str] = ..., compatibility: _Optional[_Union[KvCompatibility, _Mapping]] = ..., transports: _Optional[_Iterable[str]] = ..., host: _Optional[_Union[HostIdentity, _Mapping]] = ...) -> None: ...

class HostIdentity(_message.Message):
    __slots__ = ("boot_id", "pid_namespace", "uid", "cma", "rdma", "ipc_namespace", "tcp", "gpus")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PID_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    CMA_FIELD_NUMBER: _ClassVar[int]
    RDMA_FIELD_NUMBER: _ClassVar[int]
    IPC_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TCP_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    pid_namespace: str
    uid: int
    cma: bool
    rdma: bool
    ipc_namespace: str
    tcp: bool
    gpus: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, boot_id: _Optional[str] = ..., pid_namespace: _Optional[str] = ..., uid: _Optional[int] = ..., cma: bool = ..., rdma: bool = ..., ipc_namespace: _Optional[str] = ..., tcp: bool = ..., gpus: _Optional[_Iterable[str]] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("worker_id", "epoch", "compatibility", "transports", "nixl_metadata", "pool", "host", "cuda_ipc_metadata", "other_ranks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    NIXL_METADATA_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_METADATA_FIELD_NUMBER: _ClassVar[int]
    OTHER_RANKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: str
    compatibility: KvCompatibility
    transports: _containers.RepeatedScalarFieldContainer[str]
    nixl_metadata: bytes
    pool: bytes
    host: HostIdentity
    cuda_ipc_metadata: bytes
    other_ranks: _containers.RepeatedCompositeFieldContainer[RankPool]
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[str] = ..., compatibility: _Optional[_Union[KvCompatibility, _Mapping]] = ..., transports: _Optional[_Iterable[str]] = ..., nixl_metadata: _Optional[bytes] = ..., pool: _Optional[bytes] = ..., host: _Optional[_Union[HostIdentity, _Mapping]] = ..., cuda_ipc_metadata: _Optional[bytes] = ..., other_ranks: _Optional[_Iterable[_Union[RankPool, _Mapping]]] = ...) -> None: ...

class RankPool(_message.Message):
    __slots__ = ("nixl_metadata", "pool", "cuda_ipc_metadata")
    NIXL_METADATA_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_METADATA_FIELD_NUMBER: _ClassVar[int]
    nixl_metadata: bytes
    pool: bytes
    cuda_ipc_metadata: bytes
    def __init__(self, nixl_metadata: _Optional[bytes] = ..., pool: _Optional[bytes] = ..., cuda_ipc_metadata: _Optional[bytes] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_s",)
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    deadline_s: float
    def __init__(self, deadline_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: str
    def __init__(self, role: _Optional[str] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ("role", "took_s")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    role: str
    took_s: float
    def __init__(self, role: _Optional[str] = ..., took_s: _Optional[float] = ...) -> None: ...

class GetStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStateResponse(_message.Message):
    __slots__ = ("load", "worker_id", "epoch", "draining", "integrity_ok", "integrity_message", "transports", "rates")
    class TransportsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class RatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: PairRate
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[PairRate, _Mapping]] = ...) -> None: ...
    LOAD_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_OK_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    load: WorkerLoad
    worker_id: str
    epoch: str
    draining: bool
    integrity_ok: bool
    integrity_message: str
    transports: _containers.ScalarMap[str, str]
    rates: _containers.MessageMap[str, PairRate]
    def __init__(self, load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., worker_id: _Optional[str] = ..., epoch: _Optional[str] = ..., draining: bool = ..., integrity_ok: bool = ..., integrity_message: _Optional[str] = ..., transports: _Optional[_Mapping[str, str]] = ..., rates: _Optional[_Mapping[str, PairRate]] = ...) -> None: ...
