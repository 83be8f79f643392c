"""The hand-made BlockBytes is protobuf's own, byte for byte."""

from __future__ import annotations

import pytest

from tandem.net.rpc.block_bytes import decode, encode
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb

SIZES = [1, 127, 128, 16383, 16384, 1 << 21, (1 << 21) + 7]


@pytest.mark.parametrize("size", SIZES)
def test_protobuf_reads_what_is_encoded_and_the_other_way_round(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    parts = [memoryview(data)[: size // 3], data[size // 3 :]]
    message = pb.BlockBytes(data=data)
    assert encode(parts) == message.SerializeToString()
    assert pb.BlockBytes.FromString(encode(parts)) == message
    assert bytes(decode(message.SerializeToString())) == data


def test_an_empty_message_has_no_data() -> None:
    assert bytes(decode(pb.BlockBytes().SerializeToString())) == b""
    assert pb.BlockBytes.FromString(encode([])).data == b""


@pytest.mark.parametrize(
    "message", [b"\x12\x01a", b"\x0a", b"\x0a\x02a", b"\x0a\x01ab", b"\x0a" + b"\xff" * 12]
)
def test_what_is_no_such_message_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="BlockBytes"):
        decode(message)
