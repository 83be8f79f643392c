"""Says where KV lies, as the C++ decoder takes it."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array

from tandem_kernels.kv_cache import KvPool, StaticKv
from tandem_kernels.kv_fp8 import FixedScales
from tandem_kernels.native.library import Kind, KvGroup

_KINDS = {
    "float32": Kind.F32,
    "bfloat16": Kind.BF16,
    "int8": Kind.I8,
    "fp8_e4m3": Kind.F8,
    "k8v4": Kind.I8_I4,
    "int4": Kind.I4,
}
_LATENT_KINDS = {"float32": Kind.I8_F32, "bfloat16": Kind.I8_BF16}  # by the rotated keys


def kv_kind_of(pool: KvPool) -> Kind:
    """Returns what the rows of a pool are made of."""
    if pool.layout.rotated is not None:
        return _LATENT_KINDS[pool.layout.rotated.dtype]
    return _KINDS[pool.layout.dtype]


def kv_groups_of(pools: Sequence[KvPool]) -> Array[KvGroup]:
    """Returns where the KV of each group lies; a step adds which blocks it has."""
    return (KvGroup * len(pools))(
        *(
            KvGroup(
                kv=pool.memory.data_ptr(),
                block_bytes=pool.layout.block_bytes,
                head_bytes=pool.layout.head_bytes,
                layer_bytes=pool.layout.layer_bytes,
                **_static_fields(pool.static),
            )
            for pool in pools
        )
    )


def _static_fields(static: StaticKv | None) -> dict[str, int]:
    if static is None:
        return {}
    if isinstance(static, FixedScales):
        return {"fixed_scales": static.scales.data_ptr()}
    return {"key_order": static.order.data_ptr(), "key_scales": static.scales.data_ptr()}
