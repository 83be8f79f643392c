"""The order of bytes in the pool of one KV group.

A pool is an array [num_blocks][num_kv_heads][num_layers] of parts. A part is the KV of one layer
and one head for all tokens of a block:

    keys [block_size][head_dim] | values [block_size][head_dim] | scales | padding

With latent attention there is one head. Its parts have latents in place of keys, and no values,
because values are computed from latents. If the latents are quantized, a part also has the rotated
keys, which are not quantized:

    latents [block_size][rank] | rotated keys [block_size][rope] | scales | padding

Only quantized dtypes have scales and padding. Scales are float16. There is one for the keys and one
for the values of each token, or one for each latent; the scales of all keys come first. A part is
padded to a multiple of 64 bytes, so that each part starts on a cache line.

If layers have indexers (sparse attention), the keys of the indexers follow the parts of all heads,
as an array [layers with an indexer][block_size][dim]. They are padded to whole parts:

    parts [num_kv_heads][num_layers] | index keys [layers][block_size][dim] | padding

The bytes of a block are contiguous, so one descriptor is enough to transfer a block. A
tensor-parallel rank has some neighbouring heads of each block. Their bytes are contiguous too.

No other module knows this order. This module imports no tensor library, so that the transfer code
can use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.common.dtypes import IndexKeys, RotatedKey, is_quantized, kv_part_bytes, kv_row_bytes
from tandem.errors import ConfigError

if TYPE_CHECKING:
    from tandem.common.config.engine import EngineOptions


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The shape of one KV group's pool. Properties whose names end in `_bytes` are sizes in
    bytes."""

    num_blocks: int
    num_kv_heads: int
    num_layers: int
    block_size: int
    head_dim: int
    dtype: str  # name of the KV data type, a key of KV_BITS
    has_values: bool = True  # False: latent attention, which stores no values
    # Set only for quantized latents: the rotated key that each token stores beside its latent.
    rotated: RotatedKey | None = None
    index: IndexKeys | None = None  # None: no layer has an indexer

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of a token's keys and bytes of its values, in one layer of one head. With quantized
        latents: bytes of the latent and bytes of the rotated key."""
        return kv_row_bytes(self.dtype, self.head_dim, self.has_values, self.rotated)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one head in a block: keys, values, scales and padding."""
        return kv_part_bytes(
            self.dtype, self.block_size, self.head_dim, self.has_values, self.rotated
        )

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in a block, for all layers."""
        return self.num_layers * self.layer_bytes

    @property
    def block_bytes(self) -> int:
        num_bytes = self.num_kv_heads * self.head_bytes
        if self.index is not None:
            num_bytes += self.index.num_bytes(self.dtype, self.block_size, self.layer_bytes)
        return num_bytes

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def offset(self, block_id: int) -> int:
        """Returns the byte offset of a block in the pool. Raises ValueError for an unknown id."""
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block id is {block_id}; it must be from 0 to {self.num_blocks - 1}")
        return block_id * self.block_bytes

    def describe(self) -> str:
        """Returns a description that two workers compare before they exchange blocks. It leaves out
        the pool's size."""
        scales = " scales=float16" if is_quantized(self.dtype) else ""
        values = "" if self.has_values else " values=none"
        if self.rotated is not None:
            values += f" rotated={self.rotated.dim}x{self.rotated.dtype}"
        if self.index is not None:
            values += f" index={self.index.num_layers}x{self.index.dim}"
        return (
            f"block-major heads={self.num_kv_heads} layers={self.num_layers} "
            f"block={self.block_size} head_dim={self.head_dim} dtype={self.dtype}{scales}{values}"
        )


def num_blocks_of(config: EngineOptions, block_bytes: int, state_bytes: int = 0) -> int:
    """Returns the number of blocks of a pool whose blocks have `block_bytes` bytes. `state_bytes`
    of the KV memory are for states. Raises ConfigError if not even one block fits."""
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
        given = f"--num-blocks is {config.num_blocks}"
    else:
        num_blocks = (config.kv_bytes - state_bytes) // block_bytes
        given = f"--kv-memory is {config.kv_bytes}, and a block takes {block_bytes} bytes"
        if state_bytes:
            given += f", the states {state_bytes}"
    if num_blocks < 1:
        raise ConfigError(f"{given}; the KV pool needs at least one block")
    return num_blocks
