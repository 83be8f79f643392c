"""The order of bytes in the pool of a state group: the layers with states.

A pool is an array [slots][heads][layers] of parts. A slot has the states of one sequence. A part is
the state of one layer and one head, in float32 or bfloat16:

    matrix [key dim][value dim] | conv [kernel - 1][channels of the head] | padding

With int8, each row of the matrix has a scale:

    scales, float32 [key dim] | conv, bfloat16 | matrix, int8 | padding

Kernels compute on float32. With another type, the states of the sequences that run are also in
float32 beside the pool (executor/working_states.py).

`conv` has the last inputs of the convolution, the oldest first. The heads share the channels of
each section of the convolution (`head_sections`), such as q, k and v of Gated DeltaNet. A part is
padded to a multiple of 64 bytes. The heads of a short convolution have no matrix.

A slot is to a state group what a block is to other groups. So the bytes of a slot are contiguous,
and a tensor-parallel rank has neighbouring heads of it. A slot of a large model has many times the
bytes of a block. So it is transferred in pieces (`num_pieces`), each of which has a block id of its
own (kv_groups.py). The heads of a rank have as many pieces as all heads, which are then smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from tandem.common.dtypes import DTYPE_BYTES
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.models.config.linear_attention import LinearAttention

_ALIGNMENT_BYTES = 64
PIECE_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class StateLayout(BlockLayout):
    """The shape of a state group's pool. `num_kv_heads` is the number of heads, `head_dim` the
    value dim, and `num_blocks` the number of slots. A frozen state belongs to the block of
    `block_size` tokens that it follows."""

    linear: LinearAttention = field(kw_only=True)

    @classmethod
    def of(
        cls,
        linear: LinearAttention,
        *,
        num_slots: int,
        num_layers: int,
        block_size: int,
        dtype: str = "float32",
    ) -> StateLayout:
        return cls(
            num_blocks=num_slots,
            num_kv_heads=linear.num_heads,
            num_layers=num_layers,
            block_size=block_size,
            head_dim=linear.value_dim,
            dtype=dtype,
            linear=linear,
        )

    def working(self, num_seqs: int) -> StateLayout:
        """Returns the layout of the states of `num_seqs` running sequences in float32."""
        return replace(self, num_blocks=num_seqs, dtype="float32")

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Shape of the matrix of one head."""
        return self.linear.key_dim, self.linear.value_dim

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Shape of a head's part of the convolution's inputs."""
        return self.linear.kernel - 1, sum(self.linear.head_sections)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one head in a slot."""
        (keys, values), (taps, channels) = self.matrix_shape, self.conv_shape
        if self.dtype == "int8":
            num_bytes = 4 * keys + 2 * taps * channels + keys * values
        else:
            num_bytes = DTYPE_BYTES[self.dtype] * (keys * values + taps * channels)
        return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    @property
    def num_pieces(self) -> int:
        """Number of pieces of equal size into which a slot is divided for transfers, such that a
        piece of a slot with all heads has at most PIECE_BYTES_MAX bytes. It is the same for the
        heads of a rank. The bytes of each number of heads can be divided into so many pieces."""
        slot_bytes = self.linear.num_heads * self.head_bytes
        return _num_pieces(self.head_bytes // _ALIGNMENT_BYTES, slot_bytes, PIECE_BYTES_MAX)

    def describe(self) -> str:
        (keys, values), (taps, channels) = self.matrix_shape, self.conv_shape
        return (
            f"states heads={self.num_kv_heads} layers={self.num_layers} matrix={keys}x{values} "
            f"conv={taps}x{channels} dtype={self.dtype} pieces={self.num_pieces}"
        )


@lru_cache  # every use of a block id asks for it
def _num_pieces(num_lines: int, slot_bytes: int, bytes_max: int) -> int:
    """`num_lines` is the number of cache lines of one head."""
    return next(
        num
        for num in range(1, num_lines + 1)
        if num_lines % num == 0 and (slot_bytes // num <= bytes_max or num == num_lines)
    )
