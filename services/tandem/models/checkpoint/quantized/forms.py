"""Lists the tensors in which a checkpoint stores a quantized matrix [out, in], with their shapes.

A coding is a set of tensors that together store one matrix. "scaled" stores one number per weight.
The other codings store several numbers in one int32 word.

coding  tensor                           shape                  type
scaled  weight                           [out, in]              F8_E4M3 or I8
        weight_scale, weight_scale_inv   one scale, one per output, or one per block
packed  weight_packed                    [out, in / 8]          I32
        weight_scale                     [out, groups]
        weight_zero_point, if has_zeros  [out / 8, groups]      I32
        weight_shape                     [2]                    I64
        weight_g_idx, optional           [in]                   I32
fp4     weight_packed                    [out, in / 2]          U8
        weight_scale                     [out, groups]          F8_E4M3, or U8 with groups of 32
        weight_global_scale              [1], if groups have 16 inputs
gptq    qweight                          [in / 8, out]          I32
        qzeros                           [groups, out / 8]      I32
        scales                           [groups, out]
        g_idx, optional                  [in]                   I32
awq     qweight                          [in, out / 8]          I32
        qzeros, scales                   as for gptq

These shapes of int32 tensors are for numbers of 4 bits, of which a word holds 8. With 8 bits, a
word holds 4 numbers, so `in / 8` becomes `in / 4`. Where no type is given, any floating-point type
is allowed. The last block of a matrix and the last word of weight_zero_point may be incomplete: the
zero points of 100 outputs take 13 words. This module does not import torch.
"""

from collections.abc import Mapping

from tandem.errors import UnsupportedModel
from tandem.models.checkpoint.headers import FLOATS, Form, TensorHeader
from tandem.models.config.quantization_scheme import Coding, Scheme

# Coding -> last parts of the names of the coding's tensors. The first tensor is always present.
PARTS: Mapping[Coding, tuple[str, ...]] = {
    "scaled": ("weight", "weight_scale", "weight_scale_inv", "input_scale"),
    "packed": (
        *("weight_packed", "weight_scale", "weight_shape"),
        *("weight_zero_point", "weight_g_idx"),
    ),
    "fp4": ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
}
_WORD_BITS = 32
_SCALES = ("weight_scale_inv", "weight_scale")
_CODED = ("F8_E4M3", "I8")


def is_quantized(module: str, stored: Mapping[str, TensorHeader], scheme: Scheme) -> bool:
    """Returns True if the checkpoint stores a module's matrix in the format of `scheme`, and False
    if the matrix is not quantized."""
    plain = stored.get(f"{module}.weight")
    has_parts = any(f"{module}.{part}" in stored for part in PARTS[scheme.coding][1:])
    if scheme.coding == "scaled":
        return has_parts or (plain is not None and plain.dtype in _CODED)
    return plain is None and (has_parts or f"{module}.{PARTS[scheme.coding][0]}" in stored)


def forms_of_parts(
    module: str, shape: tuple[int, ...], stored: Mapping[str, TensorHeader], scheme: Scheme
) -> dict[str, Form]:
    """Returns the allowed shapes and types of each tensor of a quantized matrix, by stored name.

    Raises UnsupportedModel if a matrix of this shape cannot be stored with the scheme."""
    if len(shape) != 2:
        raise UnsupportedModel(f"{module} is quantized, but only matrices may be quantized")
    readers = {"scaled": _scaled, "fp4": _fp4}
    forms = readers.get(scheme.coding, _words)(module, *shape, stored, scheme)
    names = {f"{module}.{part}": form for part, form in forms.items()}
    if scheme.coding not in readers:
        return names
    unread = (f"{module}.{part}" for part in PARTS[scheme.coding])
    return names | {name: Form() for name in unread if name in stored and name not in names}


def num_groups(module: str, num_in: int, scheme: Scheme) -> int:
    """Returns the number of groups of inputs that share a scale. Raises UnsupportedModel if the
    inputs do not divide into groups of equal size."""
    size = scheme.group_size or num_in
    if num_in % size:
        raise UnsupportedModel(
            f"{module} has {num_in} inputs; the number of inputs must be a multiple of the group "
            f"size, {size}"
        )
    return num_in // size


def _scaled(
    module: str, num_out: int, num_in: int, stored: Mapping[str, TensorHeader], scheme: Scheme
) -> dict[str, Form]:
    named = [name for name in _SCALES if f"{module}.{name}" in stored]
    # Name of the tensor with the scales. If the checkpoint has no such tensor, the error message
    # reports this name as missing: weight_scale_inv for scales per block, otherwise weight_scale.
    scale = named[0] if named else _SCALES[scheme.block is None]
    shapes: tuple[tuple[int, ...], ...]
    if scheme.block is None:
        shapes = (), (1,), (1, 1), (num_out,), (num_out, 1), (1, num_out)
    else:
        rows, columns = scheme.block
        shapes = ((-(-num_out // rows), -(-num_in // columns)),)
    dtype = "F8_E4M3" if scheme.is_float else "I8"
    return {"weight": Form(((num_out, num_in),), (dtype,)), scale: Form(shapes, FLOATS)}


def _fp4(
    module: str, num_out: int, num_in: int, _: Mapping[str, TensorHeader], scheme: Scheme
) -> dict[str, Form]:
    groups = num_groups(module, num_in, scheme)
    is_nv = scheme.group_size == 16
    forms = {
        "weight_packed": Form(((num_out, num_in // 2),), ("U8",)),
        "weight_scale": Form(((num_out, groups),), ("F8_E4M3" if is_nv else "U8",)),
    }
    return forms | {"weight_global_scale": Form(((), (1,)), FLOATS)} if is_nv else forms


def _words(
    module: str, num_out: int, num_in: int, _: Mapping[str, TensorHeader], scheme: Scheme
) -> dict[str, Form]:
    groups = num_groups(module, num_in, scheme)
    word = _WORD_BITS // scheme.bits
    in_words = {"inputs": num_in} | ({} if scheme.coding == "packed" else {"outputs": num_out})
    for what, num in in_words.items():
        if num % word:
            raise UnsupportedModel(
                f"{module} has {num} {what}; the number of {what} must be a multiple of {word} "
                f"with {scheme.bits}-bit weights in {_WORD_BITS}-bit words"
            )
    order = Form(((num_in,),), ("I32",), is_optional=True)
    if scheme.coding == "packed":
        packed = {
            "weight_packed": Form(((num_out, num_in // word),), ("I32",)),
            "weight_scale": Form(((num_out, groups),), FLOATS),
            "weight_shape": Form(((2,),), ("I64",)),
            "weight_g_idx": order,
        }
        zeros = Form(((-(-num_out // word), groups),), ("I32",))
        return packed | {"weight_zero_point": zeros} if scheme.has_zeros else packed
    is_awq = scheme.coding == "awq"
    words = (num_in, num_out // word) if is_awq else (num_in // word, num_out)
    forms = {
        "qweight": Form((words,), ("I32",)),
        "qzeros": Form(((groups, num_out // word),), ("I32",)),
        "scales": Form(((groups, num_out),), FLOATS),
    }
    return forms if is_awq else forms | {"g_idx": order}
