"""The dtype that a model is computed in, chosen without a tensor library."""

from tandem.config.engine import EngineOptions

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_BF16_CPU_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86's two, arm64's one


def compute_dtype(config: EngineOptions, *, has_bfloat16: bool) -> str:
    """A key of DTYPE_BYTES. `has_bfloat16` tells whether the hardware multiplies bfloat16."""
    if config.numerics == "invariant":
        return "float32"
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if has_bfloat16 else "float32"


def cpu_has_bfloat16() -> bool:
    """Returns whether this CPU multiplies bfloat16; emulated, it is slower than float32."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
            flags = next(
                (line for line in cpuinfo if line.lower().startswith(("flags", "features"))), ""
            )
    except FileNotFoundError:
        return False
    return not _BF16_CPU_FLAGS.isdisjoint(flags.split())
