"""Converts between structs and the messages of proto/tandem/v1/worker.proto, by field name.

A field of a message has the value of the struct's field of the same name, and a struct in a field
becomes the message of that field. On the way back, a field that a message lacks gets the struct's
default. The tables below have the few fields for which this is not all.
"""

from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import Message

from tandem.common.adapter import Adapter
from tandem.common.cached_tokens import CachedTokens
from tandem.common.kv_budget import KvBudget
from tandem.common.retention import Retention
from tandem.common.sampling_params import SamplingParams
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb

_MessageT = TypeVar("_MessageT", bound=Message)
_StructT = TypeVar("_StructT", bound=msgspec.Struct)

# The struct of a message that is a field of another one.
_STRUCTS: Mapping[Any, type[msgspec.Struct]] = {
    pb.Adapter: Adapter,
    pb.CachedTokens: CachedTokens,
    pb.Retention: Retention,
    pb.SequenceKvBudget: KvBudget,
}
# Where a struct has the value of a message's field, if not under the same name.
_PLACES = {
    "Sampling.bad_words": "bad_words_token_ids",
    "SequenceInput.max_tokens": "sampling.max_tokens",
    "SequenceInput.stop_token_ids": "sampling.stop_token_ids",
    "SequenceInput.prompt_logprobs": "sampling.prompt_logprobs",
}


def _sampling_params(message: pb.SequenceInput) -> SamplingParams:
    return to_struct(
        SamplingParams,
        message.sampling,
        max_tokens=message.max_tokens,
        stop_token_ids=list(message.stop_token_ids),
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        is_resolved=True,
    )


# What reads a field from its message, if that takes more than its own value. Older routers leave
# some out, which are 0 then.
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "SequenceInput.sampling": _sampling_params,
    "Sampling.repetition_penalty": lambda sampling: sampling.repetition_penalty or 1.0,
    "Retention.weight": lambda retention: max(1, retention.weight),
}


def to_message(kind: type[_MessageT], source: object, **fields: Any) -> _MessageT:
    """Returns a message with `fields`; all its others have the values that `source` has under the
    same names."""
    writers = _writers(kind)  # type: ignore[arg-type]
    same = {name: write(source) for name, write in writers if name not in fields}
    return kind(**same, **fields)


def to_struct(kind: type[_StructT], message: Message, **fields: Any) -> _StructT:
    """Returns a struct with `fields`; the others have the values of the message under the same
    names, and their defaults where the message has none."""
    return kind(**{**to_fields(kind, message), **fields})


def to_fields(kind: type[msgspec.Struct], message: Message) -> dict[str, Any]:
    """Returns the fields of a struct that a message has."""
    readers = _readers(kind, type(message))  # type: ignore[arg-type]
    found = ((name, read(message)) for name, read in readers)
    return {name: value for name, value in found if value is not _ABSENT}


def retention_of(message: pb.SequenceInput | pb.KeepRequest) -> Retention:
    """Returns the retention of a request's KV; older routers send none."""
    return to_struct(Retention, message.retention) if message.HasField("retention") else Retention()


def cached_of(message: pb.Prefilled) -> CachedTokens:
    """Returns the cached tokens of a prompt on its prefill worker, by tier.

    Without tiers, or from an older worker, all of them count as cached in its pool.
    """
    if message.HasField("cached_by_tier"):
        return to_struct(CachedTokens, message.cached_by_tier)
    return CachedTokens(device=message.cached_tokens)


def trace_headers(message: pb.TraceContext) -> dict[str, str]:
    return {"traceparent": message.traceparent, "tracestate": message.tracestate}


_ABSENT = object()


@cache
def _writers(kind: Any) -> list[tuple[str, Callable[[Any], Any]]]:
    """Returns for each field of a message its name, and what reads its value from a struct."""
    return [(field.name, _writer(field)) for field in kind.DESCRIPTOR.fields]


def _writer(field: Any) -> Callable[[Any], Any]:
    read = attrgetter(_place(field))
    kind = _message_of(field)
    if kind is None:
        return read
    if kind is pb.TokenRun:
        return lambda source: [pb.TokenRun(ids=run) for run in read(source)]
    if field.is_repeated:
        return lambda source: [to_message(kind, each) for each in read(source)]

    def write(source: object) -> Message | None:
        value = read(source)
        return None if value is None else to_message(kind, value)

    return write


@cache
def _readers(kind: type[msgspec.Struct], message: Any) -> list[tuple[str, Callable[[Any], Any]]]:
    """Returns for each field that a struct shares with a message its name, and what reads it."""
    fields = message.DESCRIPTOR.fields
    shared = [field for field in fields if _place(field) in kind.__struct_fields__]
    return [(_place(field), _READERS.get(_name(field)) or _reader(field)) for field in shared]


def _reader(field: Any) -> Callable[[Any], Any]:
    read = attrgetter(field.name)
    kind = _message_of(field)
    if kind is pb.TokenRun:
        return lambda message: [list(run.ids) for run in read(message)]
    if field.is_repeated:
        copy = list if field.message_type is None else dict  # a map's entries are messages
        return lambda message: copy(read(message))
    if not field.has_presence:
        return read
    if kind is not None:
        struct = _STRUCTS[kind]
        return lambda message: (
            to_struct(struct, read(message)) if message.HasField(field.name) else _ABSENT
        )
    return lambda message: read(message) if message.HasField(field.name) else _ABSENT


def _message_of(field: Any) -> Any:
    """Returns the class of the messages in a field; None for numbers, texts and maps."""
    kind = field.message_type
    return None if kind is None or kind.GetOptions().map_entry else getattr(pb, kind.name)


def _name(field: Any) -> str:
    return f"{field.containing_type.name}.{field.name}"


def _place(field: Any) -> str:
    return _PLACES.get(_name(field)) or str(field.name)
