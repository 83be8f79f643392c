"""Functions with which kernels quantize and dequantize KV rows. The results are bit-identical to
those of kv_int8.py and kv_fp8.py.

The type of the pool's pointer determines the format: int8 for an int8 pool, uint8 for an e4m3 pool.
Triton's own fp8 types are not used, because not all GPUs support them. In the memory of a head in a
block, the K rows come first, then the V rows, the float16 scales of K, and the float16 scales of V.
"""

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.tuning import is_interpreted

_INTERPRETED = tl.constexpr(is_interpreted())
_INT8_LARGEST = tl.constexpr(127.0)
_E4M3_LARGEST = tl.constexpr(448.0)
_SCALE_MAX = tl.constexpr(65504.0)
_TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23; adding this number rounds to an integer
_INFINITY_BITS = tl.constexpr(0x7F800000)
_HALF_NAN = tl.constexpr(0x7E00)


def check_scales(layer_kv: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Asserts that the strides of the scales are those that kernels expect. Kernels compute them
    from the strides of `layer_kv`."""
    assert (scales is not None) == (layer_kv.dtype in (torch.int8, torch.uint8))
    if scales is not None:
        assert scales.dtype == torch.float16
        assert [2 * stride for stride in scales.stride()[:2]] == list(layer_kv.stride()[:2])
        assert scales.stride()[2:] == (layer_kv.shape[3], 1)


@triton.constexpr_function
def has_scales(pointer_type):
    """Returns whether a pool with pointers of this type is quantized."""
    return pointer_type.element_ty in (tl.int8, tl.uint8)


@triton.jit
def read(numbers, dtype: tl.constexpr):
    """Converts numbers of a pool to `dtype`. For e4m3, the results are 1/256 of the numbers. The
    caller must therefore multiply the scales by `unit`, which is 256."""
    if numbers.dtype == tl.uint8:
        bits = numbers.to(tl.uint16)
        halves = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
        return halves.to(tl.float16, bitcast=True).to(tl.float32).to(dtype)
    if _INTERPRETED:  # The interpreter would treat bfloat16 bits as integers.
        return numbers.to(tl.float32).to(dtype)
    return numbers.to(dtype)


@triton.constexpr_function
def unit(pointer_type):
    """Returns the factor by which results of `read` must be multiplied: 256 for e4m3, otherwise
    1."""
    return 256.0 if pointer_type.element_ty == tl.uint8 else 1.0


@triton.jit
def scales_of(first, second, kv, fixed_scales, is_value, HAS_FIXED: tl.constexpr):
    """Returns the float16 scales [ROWS, 1] of fp32 rows, and the fp32 divisors [ROWS, 1] by which
    the rows are divided. The divisor is the scale, or infinity if all numbers must become 0.
    `first` and `second` are the two halves of the rows, [ROWS, PAIRS] each.

    HAS_FIXED: the scales are the static scales of K and V in `fixed_scales`.
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
    """Divides rows by the divisors of `scales_of`, and rounds to the number type of the pool."""
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
    """Returns the bits of |x| as an int32. A larger |x| gives a larger int32, and NaN gives the
    largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
