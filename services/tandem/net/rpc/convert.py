"""Converts between structs and the messages of proto/tandem/v1/worker.proto, by field name.

A field of a message gets the value of the struct's field with the same name. If the value is a
struct, it is converted to a message, too. In the other direction, a struct's field that the message
lacks gets the default of the struct. The dicts below list the few fields that need more than this.
"""

from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import Message
from msgspec.structs import asdict

from tandem.common.adapter import Adapter
from tandem.common.cached_tokens import CachedTokens
from tandem.common.kv_budget import KvBudget
from tandem.common.prompt_image import PromptImage
from tandem.common.retention import Retention
from tandem.common.sampling_params import SamplingParams
from tandem.common.worker_load import GroupLoad
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb

_MessageT = TypeVar("_MessageT", bound=Message)
_StructT = TypeVar("_StructT", bound=msgspec.Struct)
_Read = Callable[[Any], Any]

# For messages inside other messages: class of the message -> class of the corresponding struct.
_STRUCTS: Mapping[Any, type[msgspec.Struct]] = {
    pb.Adapter: Adapter,
    pb.CachedTokens: CachedTokens,
    pb.KvGroupLoad: GroupLoad,
    pb.PromptImage: PromptImage,
    pb.Retention: Retention,
    pb.SequenceKvBudget: KvBudget,
}
# Field of a message -> path of the value in the struct. Only fields whose value has another name in
# the struct, or is in a struct inside the struct, are in this dict.
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


# Field of a message -> function that takes the message and returns the value for the struct. Only
# fields whose value must be converted are in this dict. For example, an older router does not send
# a repetition penalty. The message then has 0, and the struct gets 1.
_READERS: Mapping[str, _Read] = {
    "SequenceInput.sampling": _sampling_params,
    "Sampling.repetition_penalty": lambda sampling: sampling.repetition_penalty or 1.0,
    "Retention.weight": lambda retention: max(1, retention.weight),
}


def to_message(kind: type[_MessageT], source: object, **fields: Any) -> _MessageT:
    """Converts the struct `source` to a message of the class `kind`. A field in `fields` gets the
    value given there instead of the struct's value."""
    values_of = _writer(kind, type(source), tuple(fields))  # type: ignore[arg-type]
    return kind(**values_of(source), **fields)


def to_struct(kind: type[_StructT], message: Message, **fields: Any) -> _StructT:
    """Converts a message to a struct of the class `kind`. A field in `fields` gets the value given
    there instead of the message's value. A field that the message lacks gets the struct's
    default."""
    return kind(**{**to_fields(kind, message), **fields})


def to_fields(kind: type[msgspec.Struct], message: Message) -> dict[str, Any]:
    """Returns field name -> value for the fields of the struct class `kind`. Fields that the
    message lacks are left out."""
    found: dict[str, Any] = _reader(kind, type(message))(message)  # type: ignore[arg-type]
    return found


def retention_of(message: pb.SequenceInput | pb.KeepRequest) -> Retention:
    """Returns the retention of a request's KV. Routers of older versions do not send the retention.
    The result is then the default."""
    return to_struct(Retention, message.retention) if message.HasField("retention") else Retention()


def cached_of(message: pb.Prefilled) -> CachedTokens:
    """Returns how many tokens of a prompt each tier of the prefill worker had cached.

    A worker without tiers, or with an older version, sends only the total number. The result then
    has all cached tokens in the worker's KV pool.
    """
    if message.HasField("cached_by_tier"):
        return to_struct(CachedTokens, message.cached_by_tier)
    return CachedTokens(device=message.cached_tokens)


def trace_headers(message: pb.TraceContext) -> dict[str, str]:
    return {"traceparent": message.traceparent, "tracestate": message.tracestate}


_ABSENT = object()


@cache
def _writer(kind: Any, source: type, given: tuple[str, ...]) -> _Read:
    """Returns a function that takes a struct of the class `source`, and returns field name -> value
    for the message class `kind`. Fields in `given` are left out."""
    fields = [field for field in kind.DESCRIPTOR.fields if field.name not in given]
    copied = {field.name: _place(field) for field in fields if _message_of(field) is None}
    made = {field.name: _write(field) for field in fields if field.name not in copied}
    if not made and {*copied.values()} == {*getattr(source, "__struct_fields__", ())}:
        return asdict
    return _values(copied, made)


def _write(field: Any) -> _Read:
    read = attrgetter(_place(field))
    kind = _message_of(field)
    if kind is pb.TokenRun:
        return lambda source: [pb.TokenRun(ids=run) for run in read(source)]
    if field.is_repeated:
        return lambda source: [to_message(kind, each) for each in read(source)]

    def write(source: object) -> Message | None:
        value = read(source)
        return None if value is None else to_message(kind, value)

    return write


@cache
def _reader(kind: type[msgspec.Struct], message: Any) -> _Read:
    """Returns a function that takes a message, and returns field name -> value for the struct class
    `kind`. The function reads only fields that both classes have."""
    named = {_place(field): field for field in message.DESCRIPTOR.fields}
    shared = {name: field for name, field in named.items() if name in kind.__struct_fields__}
    copied = {
        name: field.name
        for name, field in shared.items()
        if not (field.is_repeated or field.has_presence or _name(field) in _READERS)
    }
    made = {
        name: _READERS.get(_name(field)) or _read(field)
        for name, field in shared.items()
        if name not in copied
    }
    return _values(copied, made)


def _read(field: Any) -> _Read:
    read = attrgetter(field.name)
    kind = _message_of(field)
    if kind is pb.TokenRun:
        return lambda message: [list(run.ids) for run in read(message)]
    if field.is_repeated and kind is None:
        # A repeated field with a message type, but with kind None, is a map.
        copy = list if field.message_type is None else dict
        return lambda message: copy(read(message))
    if kind is not None:
        struct = _STRUCTS[kind]
        if field.is_repeated:
            return lambda message: tuple(to_struct(struct, each) for each in read(message))
        return lambda message: (
            to_struct(struct, read(message)) if message.HasField(field.name) else _ABSENT
        )
    return lambda message: read(message) if message.HasField(field.name) else _ABSENT


def _values(copied: Mapping[str, str], made: Mapping[str, _Read]) -> _Read:
    """Returns a function that takes an object and returns name -> value.

    `copied` maps some names to attribute paths, such as "max_tokens" to "sampling.max_tokens".
    `made` maps the other names to functions that compute the value from the object. A single
    attrgetter reads all paths, because this is fast.
    """
    if len(copied) < 2:  # an attrgetter with one path returns the value itself and not a tuple
        made = {**{name: attrgetter(place) for name, place in copied.items()}, **made}
        copied = {}
    read_all: _Read = attrgetter(*copied.values()) if copied else lambda source: ()

    def values(source: object) -> dict[str, Any]:
        found = dict(zip(copied, read_all(source), strict=True))
        for name, read in made.items():
            if (value := read(source)) is not _ABSENT:
                found[name] = value
        return found

    return values


def _message_of(field: Any) -> Any:
    """Returns the class of the message or messages in a field. Returns None if the field has
    numbers, texts or a map."""
    kind = field.message_type
    return None if kind is None or kind.GetOptions().map_entry else getattr(pb, kind.name)


def _name(field: Any) -> str:
    return f"{field.containing_type.name}.{field.name}"


def _place(field: Any) -> str:
    return _PLACES.get(_name(field)) or str(field.name)
