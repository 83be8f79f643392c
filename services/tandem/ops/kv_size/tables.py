"""Formats the results of `tandem kv-size` as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.table import Table

from tandem.ops.kv_size.answer import KvSizeAnswer
from tandem.ops.kv_size.options import KvSizeOptions
from tandem.ops.kv_size.sizes import DeviceFit, KvSize

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def tables(answer: KvSizeAnswer, options: KvSizeOptions) -> Iterator[Table | str]:
    """Yields the tables of the results, and lines of text between the tables."""
    yield (
        f"{answer.model}: {answer.parameters:,} parameters, {answer.layers} layers, "
        f"{answer.heads} heads, {answer.kv_heads} KV heads of {answer.head_dim}; blocks of "
        f"{answer.block_size} tokens, {answer.batch} x {answer.context:,} tokens"
    )
    yield _sizes("dtype", answer, ((size.dtype, size) for size in answer.dtypes))
    kinds = ((f"{s.attention}, {s.kv_heads} KV heads", s) for s in answer.attention)
    yield _sizes(f"attention in {options.kv_dtype}", answer, kinds)
    if options.tensor_parallel != (1,):
        ranks = ((f"1 of {s.tensor_parallel}", s) for s in answer.ranks)
        yield _sizes(f"rank in {options.kv_dtype}", answer, ranks)
    if answer.device:
        yield _device(answer.device, answer.context, options)
    if answer.workers:
        yield from _workers(answer, options)


def binary(num_bytes: int) -> str:
    """Formats a number of bytes in the largest fitting unit, such as 64 GiB for 68719476736."""
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.2f}".rstrip("0").rstrip(".") + f" {name}"
    return f"{num_bytes:,} bytes"


def _sizes(title: str, answer: KvSizeAnswer, rows: Iterable[tuple[str, KvSize]]) -> Table:
    names = ("bytes a token", "bytes a block", f"{answer.context:,} tokens", f"x {answer.batch}")
    table = _table(title, names)
    for name, size in rows:
        numbers = (f"{size.token_bytes:,}", f"{size.block_bytes:,}")
        table.add_row(name, *numbers, binary(size.sequence_bytes), binary(size.batch_bytes))
    return table


def _device(fits: Sequence[DeviceFit], context: int, options: KvSizeOptions) -> Table:
    names = ("ranks", "weights", "left for KV", "blocks", "tokens", f"x {context:,} tokens")
    table = _table(f"on {options.memory:g} GiB a rank", names)
    for fit in fits:
        table.add_row(
            fit.dtype,
            str(fit.tensor_parallel),
            binary(fit.weights_bytes),
            binary(fit.free_bytes),
            f"{fit.num_blocks:,}",
            f"{fit.num_tokens:,}",
            f"{fit.num_sequences:,}",
        )
    return table


def _workers(answer: KvSizeAnswer, options: KvSizeOptions) -> Iterator[str]:
    needed = answer.workers
    assert needed is not None
    source = options.rates or "the guess for an 8B model on one large GPU"
    yield (
        f"{options.rate:g} requests a second of {options.prompt:,} + {options.completion:,} tokens "
        f"need {needed.prefill} prefill and {needed.decode} decode workers "
        f"({needed.prefill_why}; {needed.decode_why}), by {source}."
    )
    memory = (
        f"{needed.worker_blocks:,} blocks a worker"
        if needed.worker_blocks
        else "no limit, without --memory"
    )
    yield (
        f"A prompt takes a prefill worker {needed.prompt_s:.3g} s. A decode worker makes "
        f"{needed.decode_tokens_per_s:,.0f} tokens a second; {needed.sequences:,.1f} sequences "
        f"decode at once, of {needed.sequence_blocks} blocks each ({memory})."
    )


def _table(title: str, names: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(title)
    for name in names:
        table.add_column(name, justify="right")
    return table
