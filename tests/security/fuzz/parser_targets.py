"""Targets that are parsers, called in one process: bodies, gRPC messages, records, engine
messages."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol

import msgspec
from google.protobuf.message import DecodeError

from tandem.api.grpc.inference import parse_request
from tandem.api.http.body import parse_object
from tandem.api.openai.requests import (
    ChatBody,
    CompletionBody,
    drop_unknown_fields,
    parse_chat,
    parse_completion,
    validate,
)
from tandem.api.openai.tokens import DetokenizeBody, kind_of, parse_tokenize
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.image_rows import ImageRows
from tandem.engine.scheduler.check_spec import check_spec
from tandem.engine.types import Mode
from tandem.errors import BadRequest, TandemError
from tandem.net.rpc.tandem.v1 import worker_pb2
from tandem.net.security.audit_trail import AuditEntry
from tandem.net.security.keys import KeyRecord
from tandem.net.store.client import UNREADABLE
from tandem.net.store.registry import KvCompatibility, WorkerRecord
from tandem.prefix_index.entries import split_entries
from tandem.router.request.request import ClientRequest
from tandem.worker.convert import sequence_spec
from tandem.worker.engine_process import messages
from tests.security.fuzz.examples import (
    BODIES,
    COMMANDS,
    ENTRY,
    FIELDS,
    GENERATE,
    KEY,
    RECORD,
    SUBMIT,
)
from tests.security.fuzz.inputs import Bytes, JsonBytes, OneOf, PackedBytes, Source

VOCAB_SIZE = 49152
MAX_MODEL_LEN = 2048
_LAYOUT = KvLayout.of_one(BlockLayout(100, 2, 2, 16, 8, "float32"))


class ParserTarget(Protocol):
    """A parser of Tandem that does not block. `check` raises for an input that does harm."""

    @property
    def source(self) -> Source[Any]: ...

    def check(self, value: Any) -> None: ...


def body_source() -> Source[Any]:
    """Creates the source of paths and bodies of the public HTTP API."""
    return OneOf({path: JsonBytes([whole], FIELDS) for path, whole in BODIES.items()})


class Bodies:
    """Bodies of the public HTTP API."""

    def __init__(self) -> None:
        self.source = body_source()

    def check(self, value: tuple[str, bytes]) -> None:
        name, text = value
        try:
            body = parse_object(text)
            match name.partition("#")[0]:
                case "/tokenize":
                    drop_unknown_fields(kind_of(body), body)
                    parse_tokenize(body, "")
                case "/detokenize":
                    drop_unknown_fields(DetokenizeBody, body)
                    validate(DetokenizeBody, body)
                case "/v1/completions":
                    drop_unknown_fields(CompletionBody, body)
                    _check_requests(*parse_completion(body, "r").requests)
                case _:
                    drop_unknown_fields(ChatBody, body)
                    _check_requests(*parse_chat(body, "r").requests)
        except TandemError as error:
            _check_status(error)


def _check_status(error: TandemError) -> None:
    assert error.http_status < 500, error


def _check_requests(*requests: ClientRequest) -> None:
    for request in requests:
        request.check_against(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)
        request.resolved_max_tokens(5, MAX_MODEL_LEN)


class GrpcMessages:
    """Messages of clients to a router, and of a router to a worker."""

    def __init__(self) -> None:
        self.source = OneOf(
            {
                "client": Bytes([message.SerializeToString() for message in GENERATE]),
                "router": Bytes([SUBMIT.SerializeToString()]),
            }
        )

    def check(self, value: tuple[str, bytes]) -> None:
        sender, message = value
        try:
            if sender == "client":
                _check_requests(parse_request(message))
                return
            with suppress(DecodeError, UnicodeDecodeError):
                submit = worker_pb2.SubmitSequence.FromString(message)
                spec = sequence_spec(submit.input, sequence_id="s", mode=Mode.LOCAL)
                check_spec(
                    spec,
                    layout=_LAYOUT,
                    max_model_len=MAX_MODEL_LEN,
                    vocab_size=VOCAB_SIZE,
                    check_adapter=lambda _: None,
                    check_images=ImageRows(None).check,
                )
        except TandemError as error:
            _check_status(error)


class Records:
    """Records of workers and keys, entries of the audit trail, and buckets of the prefix tree."""

    _KINDS: dict[str, tuple[Any, Any]] = {
        "worker": (msgspec.msgpack, WorkerRecord),
        "compatibility": (msgspec.msgpack, KvCompatibility),
        "key": (msgspec.json, KeyRecord),
        "audit": (msgspec.json, AuditEntry),
    }

    def __init__(self) -> None:
        worker, key = msgspec.to_builtins(RECORD), msgspec.to_builtins(KEY)
        shared = msgspec.to_builtins(RECORD.compatibility)
        self.source = OneOf(
            {
                "worker": PackedBytes([worker], list(worker)),
                "compatibility": PackedBytes([shared], list(shared)),
                "key": JsonBytes([key], list(key)),
                "audit": JsonBytes([ENTRY], list(ENTRY)),
                "tree": Bytes([b"0123456789" * 3]),
            }
        )

    def check(self, value: tuple[str, bytes]) -> None:
        kind, data = value
        if kind == "tree":
            split_entries(data)
            return
        codec, type_ = self._KINDS[kind]
        with suppress(*UNREADABLE):
            again = codec.encode(codec.decode(data, type=type_))
            assert codec.encode(codec.decode(again, type=type_)) == again


class EngineMessages:
    """Messages between the two processes of a worker, as each of them parses them."""

    def __init__(self) -> None:
        self.source = Bytes([msgspec.msgpack.encode(command) for command in COMMANDS])
        self._decoders = [
            msgspec.msgpack.Decoder(messages.Command),
            msgspec.msgpack.Decoder(messages.Reply),
        ]

    def check(self, value: bytes) -> None:
        for decoder in self._decoders:
            # Sampling parameters that are not resolved are checked as a client's.
            with suppress(*UNREADABLE, BadRequest):
                again = msgspec.msgpack.encode(decoder.decode(value))
                assert msgspec.msgpack.encode(decoder.decode(again)) == again
