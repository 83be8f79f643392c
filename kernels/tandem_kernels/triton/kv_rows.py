"""Quantizes and dequantizes KV rows in kernels, bit-identical to kv_int8.py and kv_fp8.py.

An int8 pool is read through an int8 pointer, an e4m3 pool through a uint8 pointer, because not all
GPUs support Triton's fp8 types. The float16 scales of K follow the runs of K and V, and the scales
of V follow those of K (`block_layout` in tandem.engine.cache).
"""

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.tuning import is_interpreted

_INTERPRETED = tl.constexpr(is_interpreted())
_INT8_LARGEST = tl.constexpr(127.0)
_E4M3_LARGEST = tl.constexpr(448.0)
_SCALE_MAX = tl.constexpr(65504.0)
_TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer
_INFINITY_BITS = tl.constexpr(0x7F800000)
_HALF_NAN = tl.constexpr(0x7E00)


def check_scales(layer_kv: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Asserts that the scales have the layout that kernels expect. Kernels derive the strides of
    the scales from the strides of the numbers."""
    assert (scales is not None) == (layer_kv.dtype in (torch.int8, torch.uint8))
    if scales is not None:
        assert scales.dtype == torch.float16
        assert [2 * stride for stride in scales.stride()[:2]] == list(layer_kv.stride()[:2])
        assert scales.stride()[2:] == (layer_kv.shape[3], 1)


@triton.constexpr_function
def has_scales(pointer_type):
    """Returns whether a pool with this pointer type is quantized."""
    return pointer_type.element_ty in (tl.int8, tl.uint8)


@triton.jit
def read(numbers, dtype: tl.constexpr):
    """Converts numbers of a pool to `dtype`. The results for e4m3 are too small by the factor
    `unit`, by which the caller multiplies the scales."""
    if numbers.dtype == tl.uint8:
        bits = numbers.to(tl.uint16)
        halves = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
        return halves.to(tl.float16, bitcast=True).to(tl.float32).to(dtype)
    if _INTERPRETED:  # The interpreter would treat bfloat16 bits as integers.
        return numbers.to(tl.float32).to(dtype)
    return numbers.to(dtype)


@triton.constexpr_function
def unit(pointer_type):
    """Returns the factor by which the results of `read` are too small: 256 for e4m3, otherwise
    1."""
    return 256.0 if pointer_type.element_ty == tl.uint8 else 1.0


@triton.jit
def scales_of(first, second, kv, fixed_scales, is_value, HAS_FIXED: tl.constexpr):
    """Returns the float16 scales [ROWS, 1] of fp32 rows, and the fp32 divisors. A divisor is
    infinite if all numbers of its row become 0. The two halves of the rows are separate tensors
    [ROWS, PAIRS].

    HAS_FIXED: the static scales of K and V in `fixed_scales` replace the rows' own scales.
    """
    LARGEST: tl.constexpr = _E4M3_LARGEST if kv.dtype.element_ty == tl.uint8 else _INT8_LARGEST
    most = tl.max(tl.maximum(_size(first), _size(second)), 1)[:, None]
    is_finite = most < _INFINITY_BITS
    if HAS_FIXED:
        bits = tl.load(fixed_scales + is_value.to(tl.int32)).to(tl.int16, bitcast=True)
    else:
        largest = tl.where(is_finite, most, 0).to(tl.float32, bitcast=True)
        wanted = tl.minimum(tl.div_rn(largest, LARGEST), _SCALE_MAX)
        nearest = wanted.to(tl.float16)
        bits = nearest.to(tl.int16, bitcast=True) + (nearest.to(tl.float32) < wanted).to(tl.int16)
    scales = tl.where(is_finite, bits, _HALF_NAN).to(tl.int16).to(tl.float16, bitcast=True)
    wide = scales.to(tl.float32)
    return scales, tl.where(is_finite & (wide > 0.0), wide, float("inf"))


@triton.jit
def numbers_of(x, divisors, kv):
    """Quantizes rows to the number type of the pool `kv`."""
    is_zero = divisors == float("inf")
    quotients = tl.where(is_zero, 0.0, tl.div_rn(x, divisors))
    if kv.dtype.element_ty == tl.int8:
        within = tl.minimum(tl.maximum(quotients, -_INT8_LARGEST), _INT8_LARGEST)
        numbers = ((within + _TO_INTEGER) - _TO_INTEGER).to(tl.int8)
    else:
        within = tl.minimum(tl.maximum(quotients, -_E4M3_LARGEST), _E4M3_LARGEST)
        numbers = _e4m3_of(within)
    return numbers


@triton.jit
def _e4m3_of(x):
    """Rounds numbers within -448 to 448 to the nearest e4m3."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size + 0x7FFFF + ((size >> 20) & 1) - (120 << 23)) >> 20
    rounded = size.to(tl.float32, bitcast=True) + 16384.0  # rounds to multiples of 2^-9
    tiny = rounded.to(tl.uint32, bitcast=True) - (141 << 23)
    number = tl.where(size < (121 << 23), tiny, normal)
    return (number | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _size(x):
    """Returns the bits of |x| as int32. As integers, the bits have the same order as |x|, and those
    of NaN are the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
