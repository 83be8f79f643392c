"""The dtypes of the computation and of KV, and the sizes of KV. This module imports no tensor
library."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tandem.common.config.engine import EngineOptions

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# KV dtype -> (bits per number of K, bits per number of V). KV dtypes with fewer than 16 bits also
# have scales, which are not counted here: for each token, layer and head, one for K and one for V.
KV_BITS = {
    "bfloat16": (16, 16),
    "float16": (16, 16),
    "float32": (32, 32),
    "int8": (8, 8),
    "fp8_e4m3": (8, 8),
    "k8v4": (8, 4),
    # 4.5 is an average: a quarter of K's numbers have 6 bits, and the others have 4
    # (tandem_kernels.kv_int4_keys).
    "int4": (4.5, 4),
}
_SCALE_BYTES = 2  # size of a float16 scale
# Size of a cache line in bytes. The K, V and scales of one head in a block are padded to a multiple
# of this.
_PART_MULTIPLE = 64
_BF16_CPU_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the first two are of x86, "bf16" of arm64


class RotatedKey(NamedTuple):
    """The rotated key of latent attention: the part of K with rotary position encoding. In a
    quantized KV cache, only the latent is quantized. The row of a token is the quantized latent,
    then the rotated key in `dtype`."""

    dim: int
    dtype: str  # dtype of the rotated key's elements; one of the names in DTYPE_BYTES


class IndexKeys(NamedTuple):
    """The keys of the indexers of sparse attention (tandem/models/config/indexer.py). A token has
    one in each layer with an indexer."""

    num_layers: int  # number of layers with an indexer
    dim: int  # number of elements of a key

    def num_bytes(self, kv_dtype: str, block_size: int, part_bytes: int) -> int:
        """Returns the bytes of the keys in a block, in the dtype of its KV. They are padded to a
        multiple of `part_bytes`, the bytes of one head in one layer, so that a pool is an array of
        parts."""
        num_bytes = block_size * self.num_layers * self.dim * DTYPE_BYTES[kv_dtype]
        return -(-num_bytes // part_bytes) * part_bytes


def compute_dtype(config: EngineOptions, *, has_bfloat16: bool) -> str:
    """Returns the dtype of computation, a key of DTYPE_BYTES.

    `has_bfloat16` is True if the hardware multiplies bfloat16.
    """
    if config.numerics == "invariant":
        return "float32"
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if has_bfloat16 else "float32"


def cpu_has_bfloat16() -> bool:
    """Returns whether this CPU has bfloat16 multiplication. Emulation is slower than float32."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
            flags = next(
                (line for line in cpuinfo if line.lower().startswith(("flags", "features"))), ""
            )
    except FileNotFoundError:
        return False
    return not _BF16_CPU_FLAGS.isdisjoint(flags.split())


def is_quantized(kv_dtype: str) -> bool:
    """Returns whether KV of this dtype has scales beside its numbers."""
    return kv_dtype not in DTYPE_BYTES


def kv_row_bytes(
    kv_dtype: str, head_dim: int, has_values: bool = True, rotated: RotatedKey | None = None
) -> tuple[int, int]:
    """Returns (bytes of K, bytes of V) of one token for one head in one layer, without scales.

    For quantized latent attention, returns (bytes of the latent, bytes of the rotated key).
    """
    keys, values = KV_BITS[kv_dtype]
    if rotated is not None:
        latent_dim = head_dim - rotated.dim
        return int(latent_dim * keys) // 8, rotated.dim * DTYPE_BYTES[rotated.dtype]
    return int(head_dim * keys) // 8, has_values * int(head_dim * values) // 8


def kv_part_bytes(
    kv_dtype: str,
    block_size: int,
    head_dim: int,
    has_values: bool = True,
    rotated: RotatedKey | None = None,
) -> int:
    """Returns the bytes of K and V of one head in one layer of a block, scales included.

    block_layout.py describes the order of these bytes.
    """
    num_bytes = block_size * sum(kv_row_bytes(kv_dtype, head_dim, has_values, rotated))
    if not is_quantized(kv_dtype):
        return num_bytes
    num_bytes += (1 + has_values) * block_size * _SCALE_BYTES
    return -(-num_bytes // _PART_MULTIPLE) * _PART_MULTIPLE
