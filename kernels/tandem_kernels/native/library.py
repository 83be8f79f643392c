"""ctypes bindings of the compiled decoder: the structs of decoder.h and the functions of api.cpp.

`load` returns None if the decoder was not built. Arrays are passed as addresses. The caller must
keep the memory that a struct points to alive.
"""

import functools
import importlib.machinery
from collections.abc import Sequence
from ctypes import (
    CDLL,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_void_p,
)
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tandem_kernels.logprobs import Logprobs
from tandem_kernels.native.kinds import PANEL as PANEL
from tandem_kernels.native.kinds import Activation as Activation
from tandem_kernels.native.kinds import Kind as Kind
from tandem_kernels.native.kinds import Stage as Stage
from tandem_kernels.native.kinds import StateForm as StateForm
from tandem_kernels.native.kinds import packed_bytes as packed_bytes
from tandem_kernels.native.kinds import whole_steps as whole_steps
from tandem_kernels.philox import uniform
from tandem_kernels.sampling import Draw

# The version of the bits that the kernels compute from the same numbers. It is part of the name of
# the numerics, and so of block hashes: KV of another version is never reused. Version 2 adds up
# attention in pieces of 512 keys. In version 3 the sources, not the compiler, say which products
# are fused with sums, which changes the bits of layers whose sizes are no multiples of 16.
BITS_VERSION = 3
# Statuses that functions of api.cpp return.
_RANK_ENDED = 2
_NO_INSTRUCTIONS = 3
SECTIONS_MAX = 3  # sections of the channels of a layer's convolution
COPIES_MAX = 16  # copies of the residual stream, or streams (kCopiesMax of decoder.h)
ENTRY_KINDS = 2  # kinds of entries: those of attention, and those of an indexer
_UNIT_INPUTS = 64  # quantized weights: the number of inputs is padded to a multiple of 64


class Gating(Structure):
    _fields_ = (
        ("activation", c_int32),
        *((name, c_float) for name in ("alpha", "limit", "offset")),
    )


class Matrix(Structure):
    _fields_ = (
        ("panels", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("first_panel", c_int32),
        ("num_panels", c_int32),
        ("num_in", c_int32),
        ("num_out", c_int32),
        ("kind", c_int32),
        ("scale_inputs", c_int32),
        ("gating", Gating),
        ("rest", c_void_p),
        ("order", c_void_p),
    )


class Mlp(Structure):
    _fields_ = (("gate_up", Matrix), ("down", Matrix))


class Experts(Structure):
    _fields_ = (
        ("mlps", POINTER(Mlp)),
        ("router", Matrix),
        ("correction", c_void_p),
        *(
            (name, c_int32)
            for name in (
                "num",
                "top_k",
                "is_normalized",
                "has_sigmoids",
                "has_roots",
                "weighs_inputs",
                "num_groups",
                "top_groups",
            )
        ),
        ("scale", c_float),
        ("shared_gate", c_void_p),
        *(
            (name, c_void_p)
            for name in (
                *("router_norm", "input_norm", "output_norm", "shared_output_norm"),
                *("scales", "table"),
            )
        ),
    )


class Latent(Structure):
    _fields_ = (
        ("q_norm", c_void_p),
        ("kv_norm", c_void_p),
        ("q_out", Matrix),
        ("keys", POINTER(Matrix)),
        ("values", POINTER(Matrix)),
        *((name, c_int32) for name in ("kv_rank", "rope", "plain", "value")),
        ("norm_eps", c_float),
    )


class SharedKv(Structure):
    _fields_ = (
        ("q_norm", c_void_p),
        ("kv_norm", c_void_p),
        ("q_out", Matrix),
        ("out_groups", POINTER(Matrix)),
        ("num_groups", c_int32),
        ("rope", c_int32),
    )


class Compressor(Structure):
    _fields_ = (
        ("inputs", Matrix),
        ("bias", c_void_p * ENTRY_KINDS),
        ("norm", c_void_p * ENTRY_KINDS),
        ("dims", c_int32 * ENTRY_KINDS),
        *((name, c_int32) for name in ("rate", "has_overlap")),
        *((name, c_int32) for name in ("entry_group", "entry_part", "input_group", "input_part")),
    )


class Indexer(Structure):
    _fields_ = (
        *((name, Matrix) for name in ("queries", "keys", "head_weights")),
        *((name, c_void_p) for name in ("query_norm", "key_norm", "key_bias")),
        *(
            (name, c_int32)
            for name in (
                "num_heads",
                "dim",
                "rope",
                "top_k",
                "choice_size",
                "num_local",
                "place",
                "rate",
            )
        ),
        ("key_norm_eps", c_float),
    )


class StateLayer(Structure):
    _fields_ = (
        *((name, c_void_p * SECTIONS_MAX) for name in ("taps", "conv_bias")),
        *((name, c_void_p) for name in ("a_log", "dt_bias", "skip", "norm")),
        *(
            (name, c_int32)
            for name in (
                *("form", "has_norm", "num_k_heads", "num_v_heads", "key_dim", "value_dim"),
                *("num_taps", "group", "place"),
            )
        ),
        ("rate_max", c_float),
        ("norm_eps", c_float),
        ("decay_out", Matrix),
        ("gate_out", Matrix),
    )


class LayerInput(Structure):
    _fields_ = (("gate", Matrix), ("projection", Matrix), ("norm", c_void_p))


class LayerInputs(Structure):
    _fields_ = (
        ("embedding", c_void_p),
        ("projection", Matrix),
        ("norm", c_void_p),
        *((name, c_int32) for name in ("embedding_kind", "size", "vocab")),
        ("multiplier", c_float),
    )


class AltUpLayer(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("router", "prediction", "correction", "output_scale")),
        ("left", Matrix),
        ("right", Matrix),
        ("laurel_norm", c_void_p),
    )


class AltUp(Structure):
    _fields_ = (
        ("make", POINTER(Matrix)),
        ("merge", POINTER(Matrix)),
        ("num", c_int32),
        ("active", c_int32),
    )


class StreamMixture(Structure):
    _fields_ = (("matrix", Matrix), ("base", c_void_p), ("scale", c_void_p))


class LayerStreams(Structure):
    _fields_ = (("attention", StreamMixture), ("mlp", StreamMixture))


class Streams(Structure):
    _fields_ = (
        ("head", StreamMixture),
        ("num", c_int32),
        ("num_iterations", c_int32),
        ("eps", c_float),
    )


class Layer(Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("attention_post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("sinks", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_post_norm", c_void_p),
        ("qkv", Matrix),
        ("attention_out", Matrix),
        ("projected_factors", c_void_p),
        ("mlp", Mlp),
        ("experts", POINTER(Experts)),
        ("latent", POINTER(Latent)),
        ("rope", c_int32),
        ("window", c_int32),
        ("group", c_int32),
        ("place", c_int32),
        ("num_gates", c_int32),
        ("has_attention", c_int32),
        ("has_mlp", c_int32),
        ("state", POINTER(StateLayer)),
        *((name, c_int32) for name in ("num_kv_heads", "head_dim", "value_dim", "shares_kv")),
        ("scalar", c_float),
        ("input", POINTER(LayerInput)),
        ("indexer", POINTER(Indexer)),
        ("shares_choice", c_int32),
        ("has_sparse_gates", c_int32),
        ("gate_deviations", c_float),
        ("alt_up", POINTER(AltUpLayer)),
        ("shared_kv", POINTER(SharedKv)),
        ("compressor", POINTER(Compressor)),
        ("streams", POINTER(LayerStreams)),
    )


class Model(Structure):
    _fields_ = (
        ("layers", POINTER(Layer)),
        ("final_norm", c_void_p),
        ("embedding", c_void_p),
        ("output", Matrix),
        *(
            (name, c_int32)
            for name in (
                "num_layers",
                "hidden",
                "num_heads",
                "inner",
                "vocab",
                "embedding_kind",
                "computed_kind",
            )
        ),
        ("norm_eps", c_float),
        ("num_threads", c_int32),
        *(
            (name, c_int32)
            for name in (
                "norms_all_heads",
                "norms_rotated",
                "centers_norms",
                "is_parallel",
                "norms_values",
            )
        ),
        *(
            (name, c_float)
            for name in (
                "attention_scale",
                "embedding_multiplier",
                "residual_multiplier",
                "logits_multiplier",
                "logit_cap",
                "attention_cap",
                "value_scale",
            )
        ),
        ("layer_inputs", POINTER(LayerInputs)),
        ("alt_up", POINTER(AltUp)),
        ("streams", POINTER(Streams)),
    )


class KvGroup(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("kv", "slots", "block_tables")),
        *((name, c_int64) for name in ("block_bytes", "head_bytes", "layer_bytes")),
        *((name, c_void_p) for name in ("key_order", "key_scales", "fixed_scales", "parts")),
    )


class LoraPart(Structure):
    _fields_ = (("b", Matrix), ("first_output", c_int32), ("first_rank", c_int32))


class LoraProduct(Structure):
    _fields_ = (("a", Matrix), ("parts", POINTER(LoraPart)), ("num_parts", c_int32))


class LoraLayer(Structure):
    _fields_ = (
        *(
            (name, LoraProduct)
            for name in (
                *("qkv", "attention_out", "gate_up", "down", "q_out"),
                *("decay_out", "gate_out"),
            )
        ),
        ("keys", POINTER(LoraProduct)),
        ("values", POINTER(LoraProduct)),
    )


class LoraRows(Structure):
    _fields_ = (("layers", POINTER(LoraLayer)), ("first_row", c_int32), ("num_rows", c_int32))


class Step(Structure):
    _fields_ = (
        *(
            (name, c_void_p)
            for name in (
                "token_ids",
                "positions",
                "cosines",
                "sines",
                "query_factors",
                "spans",
                "logit_rows",
                "embeddings",
                "groups",
                "logits",
                "most_likely",
                "block_sums",
            )
        ),
        *(
            (name, c_int32)
            for name in ("num_rows", "num_spans", "num_logit_rows", "block_size", "kv_kind")
        ),
        ("table_floats", c_int64),
        ("table_positions", c_int64),
        ("adapted", POINTER(LoraRows)),
        ("num_adapted", c_int32),
        ("lora_rank", c_int32),
    )


class Measure(Structure):
    _fields_ = (
        *(
            (name, c_void_p)
            for name in ("rows", "token_ids", "logprobs", "ranks", "top_ids", "top_logprobs")
        ),
        ("num_rows", c_int32),
        ("num_top", c_int32),
    )


class Draws(Structure):
    _fields_ = (("rows", c_void_p), ("token_ids", c_void_p), ("num_rows", c_int32))


class _Ranks(Structure):
    _fields_ = (
        ("rank", c_int32),
        ("num", c_int32),
        ("shared", c_void_p),
        ("buffer_bytes", c_size_t),
    )


class SharedMemory(NamedTuple):
    """The memory that the ranks of a tensor-parallel engine share, as one of them has mapped it."""

    rank: int
    num_ranks: int
    address: int
    buffer_bytes: int  # room for each buffer of a step


class RankEnded(Exception):
    """A rank of a tensor-parallel engine has ended, so the others cannot compute any more."""


# The struct Draw of decoder.h.
_DRAW = np.dtype(
    [
        *(("logits", np.uint64), ("top_p", np.float64), ("uniform", np.float64)),
        *(("temperature", np.float32), ("min_p", np.float32)),
        *(("num", np.int32), ("top_k", np.int32)),
    ]
)
_BLOCK_ARGUMENTS = [c_void_p, c_int32, c_int64, c_int64, c_int64, c_void_p]


class Library:
    """The functions of the compiled decoder, with Python types."""

    def __init__(self, path: Path) -> None:
        self._library = CDLL(str(path))
        signatures: dict[str, tuple[Any, list[Any]]] = {
            "tandem_instructions": (c_char_p, [c_char_p]),
            "tandem_best_instructions": (c_char_p, []),
            "tandem_packed_kind": (c_int32, [c_char_p, c_int32]),
            "tandem_pack": (
                None,
                [c_void_p, c_int32, c_int64, c_int64, c_int32, c_void_p, c_void_p],
            ),
            "tandem_create": (c_void_p, [POINTER(Model), c_char_p, POINTER(_Ranks)]),
            "tandem_destroy": (None, [c_void_p]),
            "tandem_to_last_kv": (c_int, [c_void_p, POINTER(Step)]),
            "tandem_to_logits": (c_int, [c_void_p, POINTER(Step)]),
            "tandem_final_hidden": (None, [c_void_p, c_void_p, c_int32, c_void_p]),
            "tandem_measure": (None, [c_void_p, c_void_p, POINTER(Measure)]),
            "tandem_draw": (c_int, [c_char_p, POINTER(Draws), c_int32]),
            "tandem_shared_bytes": (c_int64, [c_int64]),
            "tandem_share": (None, [c_void_p]),
            "tandem_wait_until_taken": (c_int, [c_void_p, c_int32]),
            "tandem_post": (None, [c_void_p]),
            "tandem_wait_for_message": (c_int, [c_void_p, c_uint32]),
            "tandem_take": (None, [c_void_p]),
            "tandem_break": (None, [c_void_p]),
        }
        for name, (result, arguments) in signatures.items():
            self._function(name, result, arguments)

    def instructions(self, wanted: str | None = None) -> str | None:
        """Returns `wanted`, or None if the processor does not support it or it was not built.
        Without `wanted`, returns the best instruction set that was built and that the processor
        supports: amx, avx512_bf16, avx512, avx2, neon or plain."""
        name = self._library.tandem_instructions(wanted.encode() if wanted else None)
        return name.decode() if name else None

    @property
    def best_instructions(self) -> str:
        """The best instruction set of this processor, whether it was built or not."""
        return bytes(self._library.tandem_best_instructions()).decode()

    def packed_kind(self, kind: Kind, wanted: str | None = None) -> Kind:
        """Returns the kind to which weights of `kind` are packed for the instruction set `wanted`.
        If `wanted` is None, uses the best instruction set of the processor."""
        return Kind(self._library.tandem_packed_kind(wanted.encode() if wanted else None, kind))

    def pack(
        self,
        weights: int,
        weights_kind: Kind,
        shape: tuple[int, int],
        kind: Kind,
        panels: npt.NDArray[np.uint8],
    ) -> npt.NDArray[np.float32] | None:
        """Packs weights of `shape` [out, in] at the address `weights` into `panels`, as `kind`.
        Returns the scale of each output if `kind` is I8, otherwise None."""
        assert panels.size == packed_bytes(shape, kind)
        num_out, num_in = shape
        scales = np.empty(num_out, np.float32) if kind is Kind.I8 else None
        self._library.tandem_pack(
            weights,
            weights_kind,
            num_out,
            num_in,
            kind,
            panels.ctypes.data,
            scales.ctypes.data if scales is not None else None,
        )
        return scales

    def pack_fp8(
        self,
        numbers: int,
        shape: tuple[int, int],
        kind: Kind,
        panels: npt.NDArray[np.uint8],
    ) -> bool:
        """Packs fp8 weights of `shape` [out, in] at the address `numbers` into `panels`, without
        their scales. Returns False if one of the weights is NaN."""
        assert panels.size == packed_bytes(shape, kind)
        arguments = [c_void_p, c_int64, c_int64, c_int32, c_void_p]
        function = self._function("tandem_pack_fp8", c_int32, arguments)
        return bool(function(numbers, *shape, kind, panels.ctypes.data))

    def kind_of_blocks(self, block_type: int) -> Kind | None:
        """Returns the kind to which blocks of a GGUF type are packed; None if the type cannot be
        packed."""
        kind = self._function("tandem_kind_of_blocks", c_int32, [c_int32])(block_type)
        return None if kind < 0 else Kind(kind)

    def quantized_bytes(self, shape: tuple[int, int], kind: Kind) -> int:
        """Returns the size in bytes of packed weights [out, in], for kinds in which a group of
        inputs shares a scale."""
        num_out, num_in = shape
        unit_bytes: int = self._function("tandem_unit_bytes", c_int64, [c_int32])(kind)
        return -(-num_out // PANEL) * -(-num_in // _UNIT_INPUTS) * unit_bytes

    def pack_blocks(
        self,
        blocks: int,
        block_type: int,
        shape: tuple[int, int],
        first_output: int,
        panels: npt.NDArray[np.uint8],
    ) -> None:
        """Packs a quantized matrix of `shape` [out, in] at the address `blocks` into `panels`,
        which must be zeros at first. Row 0 becomes output `first_output`, so that several matrices
        can be packed as one."""
        function = self._function("tandem_pack_blocks", c_int32, _BLOCK_ARGUMENTS)
        known = function(blocks, block_type, *shape, first_output, panels.ctypes.data)
        assert known, f"blocks of type {block_type} cannot be packed"

    def widen_blocks(self, blocks: int, block_type: int, shape: tuple[int, int], to: int) -> bool:
        """Dequantizes a quantized matrix of `shape` [out, in] at the address `blocks` to float32 at
        the address `to`. Returns False if the type is not supported."""
        arguments = [c_void_p, c_int32, c_int64, c_int64, c_void_p]
        function = self._function("tandem_widen_blocks", c_int32, arguments)
        return bool(function(blocks, block_type, *shape, to))

    def create(
        self, model: Model, instructions: str | None = None, share: SharedMemory | None = None
    ) -> int:
        """Creates a decoder and returns its handle. The caller must destroy the decoder with
        `destroy`. With `share`, the decoder is one rank of a tensor-parallel engine. Raises
        MemoryError."""
        wanted = instructions.encode() if instructions else None
        ranks = (
            _Ranks(share.rank, share.num_ranks, share.address, share.buffer_bytes)
            if share
            else _Ranks(0, 1)
        )
        decoder: int | None = self._library.tandem_create(byref(model), wanted, byref(ranks))
        if decoder is None:
            raise MemoryError("the native decoder cannot be made")
        return decoder

    def destroy(self, decoder: int) -> None:
        self._library.tandem_destroy(decoder)

    def to_last_kv(self, decoder: int, step: Step) -> None:
        """Computes the first part of a step, until the KV of all tokens is in the pool. Raises
        MemoryError or RankEnded."""
        self._check(self._library.tandem_to_last_kv(decoder, byref(step)))

    def to_logits(self, decoder: int, step: Step) -> None:
        """Computes the second part of a step, after `to_last_kv`, up to the logits. Raises
        MemoryError or RankEnded."""
        self._check(self._library.tandem_to_logits(decoder, byref(step)))

    def measure(
        self,
        decoder: int,
        logits: int,
        rows: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32],
        num_top: int,
    ) -> Logprobs:
        """Computes, for each of `rows` of the fp32 logits at the address `logits`, the log
        probabilities of one token and of the `num_top` most likely tokens. `token_ids` has the one
        token of each row."""
        num_rows = len(rows)
        found = Logprobs(
            np.empty(num_rows, np.float32),
            np.empty(num_rows, np.int32),
            np.empty((num_rows, num_top), np.int32),
            np.empty((num_rows, num_top), np.float32),
        )
        arrays = (rows, token_ids, found.logprobs, found.ranks, found.top_ids, found.top_logprobs)
        measure = Measure(*map(address, arrays), num_rows=num_rows, num_top=num_top)
        self._library.tandem_measure(decoder, logits, byref(measure))
        return found

    def draw(
        self,
        rows: Sequence[npt.NDArray[np.float32]],
        draws: Sequence[Draw],
        num_threads: int,
        instructions: str | None = None,
    ) -> list[int]:
        """Samples an index for each row of fp32 logits, [num]. Raises MemoryError, and ValueError
        if `instructions` are not available."""
        fields = [
            (
                *(address(row), draw.top_p, uniform(draw.seed, draw.position)),
                *(draw.temperature, draw.min_p, len(row), min(draw.top_k, len(row))),
            )
            for row, draw in zip(rows, draws, strict=True)
        ]
        found = np.empty(len(rows), np.int32)
        sent = np.array(fields, _DRAW)
        wanted = instructions.encode() if instructions else None
        arguments = Draws(address(sent), address(found), len(rows))
        self._check(self._library.tandem_draw(wanted, byref(arguments), num_threads))
        return found.tolist()

    def final_hidden(
        self, decoder: int, rows: npt.NDArray[np.int32], hidden_size: int
    ) -> npt.NDArray[np.float32]:
        """Returns the hidden states after the final norm, [rows, hidden_size]. `rows` has the
        indices of tokens in the decoder's last step."""
        found = np.empty((len(rows), hidden_size), np.float32)
        self._library.tandem_final_hidden(decoder, address(rows), len(rows), address(found))
        return found

    def state_operation(
        self, name: str, operation: Structure, num_threads: int, instructions: str | None
    ) -> None:
        """Calls the function `name` of api.cpp for an operation of state.h. Raises ValueError if
        `instructions` are not available."""
        wanted = instructions.encode() if instructions else None
        function = self._function(name, c_int, [c_char_p, c_void_p, c_int32])
        self._check(function(wanted, byref(operation), num_threads))

    def take_stages(self, decoder: int) -> dict[Stage, float]:
        """Returns the seconds that steps spent in each stage since the last call of this
        method."""
        seconds = (c_double * len(Stage))()
        self._function("tandem_take_stages", None, [c_void_p, POINTER(c_double)])(decoder, seconds)
        return dict(zip(Stage, seconds, strict=True))

    def product_gflops(self, num_threads: int, kind: Kind) -> float:
        """Measures the rate of matrix products in GFLOP/s, for packed weights of `kind` that fit in
        the L1 cache. The measurement takes about 0.3 s."""
        measure = self._function("tandem_product_gflops", c_double, [c_int32, c_int32])
        return float(measure(num_threads, kind))

    def read_gb_per_s(self, data: npt.NDArray[np.float32], num_threads: int) -> float:
        """Measures the memory read bandwidth in GB/s by reading `data`, which should be larger than
        all caches."""
        read = self._function("tandem_read_gb_per_s", c_double, [c_void_p, c_int64, c_int32])
        return float(read(data.ctypes.data, data.size, num_threads))

    def shared_bytes(self, buffer_bytes: int) -> int:
        """Returns the bytes that decoders need of the memory that ranks share, with buffers of at
        most `buffer_bytes` bytes each."""
        return int(self._library.tandem_shared_bytes(buffer_bytes))

    def share(self, address: int) -> None:
        """Prepares new shared memory, before any rank uses it."""
        self._library.tandem_share(address)

    def wait_until_taken(self, address: int, num_others: int) -> None:
        """Waits until the other ranks have taken all messages. Raises RankEnded."""
        self._check(self._library.tandem_wait_until_taken(address, num_others))

    def post(self, address: int) -> None:
        """Posts the message that the caller has written for the other ranks."""
        self._library.tandem_post(address)

    def wait_for_message(self, address: int, num_seen: int) -> None:
        """Waits for the message after the first `num_seen` messages. Raises RankEnded."""
        self._check(self._library.tandem_wait_for_message(address, num_seen))

    def take(self, address: int) -> None:
        """Takes a message: the first rank may overwrite it when all others have taken it."""
        self._library.tandem_take(address)

    def break_up(self, address: int) -> None:
        """Tells all ranks that one of them has ended. None of them waits for another any more."""
        self._library.tandem_break(address)

    def _function(self, name: str, result: Any, arguments: list[Any]) -> Any:
        function = getattr(self._library, name)
        function.restype, function.argtypes = result, arguments
        return function

    def _check(self, failed: int) -> None:
        if failed == _RANK_ENDED:
            raise RankEnded("a rank of the tensor-parallel engine has ended")
        if failed == _NO_INSTRUCTIONS:
            raise ValueError("this processor or the native library lacks the instruction set")
        if failed:
            raise MemoryError("no memory for the activations of this step")


@functools.cache
def load() -> Library | None:
    """Loads the compiled decoder; returns None if it was not built."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_decoder{suffix}")
        if path.exists():
            return Library(path)
    return None


def why_unusable() -> str:
    """Returns why the compiled kernels cannot compute fast on this processor; "" if they can."""
    if (library := load()) is None:
        return "the CPU kernels are not built"
    best = library.best_instructions
    if library.instructions() == best:
        return ""
    return (
        f"the CPU kernels were built for another processor: they lack {best}, the best of this one"
    )


def address(array: npt.NDArray[np.generic] | None) -> int | None:
    return None if array is None else array.ctypes.data
