"""Samples tokens as tandem_kernels/sampling.py does, on the device and without sorting the
vocabulary.

Instead of sorting, a program finds thresholds. For top_k = 50, the threshold is the logit of the
50th token: the largest logit such that at least 50 tokens have this logit or a larger one. The
thresholds of top_p and of the sampled token are found in the same way, by the total weight of the
tokens instead of their number. A program does this for one row of logits:

    1  Reads all logits and finds the largest. With temperature 0, its token is the result. If it is
       NaN or infinite before edits, the row has no token.
    2  Reads all logits again. For each of 8 levels, which are logits, counts the tokens at or above
       the level and sums their weights. The threshold is then known to be between two levels.
    3  For each threshold, reads all logits again and lists the tokens between these two levels,
       which are usually few. Then searches the threshold among the listed tokens.

Weights are summed as integers in units of 2^-40 of the most likely token's weight. Such sums are
exact, so neither the order of additions nor the batch changes a token. The result differs from that
of the host only if the random number is within about 1e-7 of the boundary between two tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from tandem_kernels.sampling import NO_TOKEN, Draw
from tandem_kernels.triton.edits import edited
from tandem_kernels.triton.tuning import next_power_of_2

_UNIT = tl.constexpr(float(1 << 40))
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_LEVELS = tl.constexpr(8)
_DEEPEST = tl.constexpr(28.0)  # exp(-28) is so small a weight that it rounds to 0
NUM_WARPS = 8
_TILE = 4096
_LEVELS_TILE = 512  # smaller than _TILE, because each token is compared with each level


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Samples token ids [n] int64 from fp32 logits [n, vocab], whose rows may be strided. Waits for
    the device, and returns the ids on the host. The result has NO_TOKEN for a row whose largest
    logit before edits is NaN or infinite; a NaN counts as the largest."""
    return launch(logits, draws).cpu()


def launch(
    logits: torch.Tensor, draws: Sequence[Draw], out: torch.Tensor | None = None
) -> torch.Tensor:
    """Samples as `sample` does, but does not wait, and returns the ids on the device: in `out`
    [n] int64 if it is given."""
    num_rows, vocab = logits.shape
    assert num_rows == len(draws)
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    unedited = logits
    logits = edited(logits, [draw.edit for draw in draws])
    numbers = packed(draws)
    if logits.is_cuda:
        numbers = numbers.pin_memory().to(logits.device, non_blocking=True)
    tile = max(16, next_power_of_2(vocab))
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    listed_ids = torch.empty(num_rows, vocab, dtype=torch.int32, device=logits.device)
    _sample[(num_rows,)](
        unedited,
        logits,
        numbers,
        out,
        listed_ids,
        vocab,
        unedited.stride(0),
        logits.stride(0),
        num_rows,
        int(logits is not unedited),
        TILE=min(_TILE, tile),
        LEVELS_TILE=min(_LEVELS_TILE, tile),
        num_warps=NUM_WARPS,
    )
    return out


def take_drawn(token_ids: torch.Tensor, drawn: torch.Tensor) -> None:
    """Replaces each negative number -1 - i in `token_ids`, int32 [n], by `drawn[i]`, int64, or by
    token 0 if that is NO_TOKEN. Does not wait."""
    num_tokens = len(token_ids)
    grid = (triton.cdiv(num_tokens, _TILE),)
    _take_drawn[grid](token_ids, drawn, num_tokens, TILE=_TILE)


@triton.jit(do_not_specialize=["num_tokens"])
def _take_drawn(token_ids, drawn, num_tokens, TILE: tl.constexpr):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = rows < num_tokens
    numbers = tl.load(token_ids + rows, mask=mask, other=0)
    is_drawn = mask & (numbers < 0)
    tokens = tl.load(drawn - 1 - numbers, mask=is_drawn, other=0)
    # NO_TOKEN is negative. Its sequence ends, and the step's results for it are not used.
    tokens = tl.maximum(tokens, 0)
    tl.store(token_ids + rows, tokens.to(tl.int32), mask=is_drawn)


def packed(draws: Sequence[Draw]) -> torch.Tensor:
    """Packs the sampling parameters into one int64 tensor with a row for each parameter and a
    column for each draw. `_sample` loads the rows by their numbers: first the numbers with a
    fraction, as the bits of fp64, then the integers."""
    floats = np.array([(d.temperature, d.top_p, d.min_p) for d in draws], np.float64)
    words = [(d.top_k, _signed(d.seed), _signed(d.position)) for d in draws]
    integers = np.array(words, np.int64)
    return torch.from_numpy(np.concatenate((floats.view(np.int64), integers), 1).T.copy())


def _signed(number: int) -> int:
    """Returns the low 64 bits of a number as a signed integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


@triton.jit(do_not_specialize=["num_rows", "are_edited"])
def _sample(
    unedited,
    logits,
    numbers,
    tokens,
    listed_ids,
    vocab,
    stride_unedited,
    stride_row,
    num_rows,
    are_edited,
    TILE: tl.constexpr,
    LEVELS_TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    unedited += row * stride_unedited
    logits += row * stride_row
    listed_ids += row * vocab
    temperature = tl.load(numbers + row).to(tl.float64, bitcast=True).to(tl.float32)
    top_p = tl.load(numbers + num_rows + row).to(tl.float64, bitcast=True)
    min_p = tl.load(numbers + 2 * num_rows + row).to(tl.float64, bitcast=True).to(tl.float32)
    top_k = tl.load(numbers + 3 * num_rows + row)
    seed = tl.load(numbers + 4 * num_rows + row)
    position = tl.load(numbers + 5 * num_rows + row)

    largest, token = _largest(unedited, vocab, TILE)
    has_token = tl.abs(largest) < float("inf")
    if are_edited != 0:
        largest, token = _largest(logits, vocab, TILE)
    if (temperature > 0.0) & (tl.abs(largest) < float("inf")):
        levels = _level_keys(largest, temperature)
        counts, masses, num_left, mass = _measure_levels(
            logits, vocab, largest, temperature, min_p, levels, LEVELS_TILE
        )
        row_of = (logits, listed_ids, vocab, largest, temperature)
        key = tl.full((), 0, tl.int32)
        nth = tl.zeros((), tl.int64)
        num_listed = 0
        # A loop instead of three calls, because a call of `_find` is a lot of code.
        for search in range(3):  # the thresholds of top_k, of top_p and of the token
            has_top_k = (search == 0) & (top_k > 0) & (top_k < num_left)
            has_top_p = (search == 1) & (top_p < 1.0)
            if has_top_k | has_top_p | (search == 2):
                share = tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64) - 1
                drawn = (_uniform(seed, position) * mass.to(tl.float64)).to(tl.int64)
                target = tl.maximum(tl.minimum(tl.where(search == 1, share, drawn), mass - 1), 0)
                target = tl.where(search == 0, top_k - 1, target)
                key, above, mass_above, num_listed = _find(
                    row_of, levels, counts, masses, target, search == 0, TILE, LEVELS_TILE
                )
                weight = _weight_of_key(key, largest, temperature)
                nth = (target - mass_above) // weight
                if search == 0:
                    mass = mass_above + (top_k - above) * weight
                if search == 1:
                    mass = mass_above + (nth + 1) * weight
        token = _nth_with_key(logits, listed_ids, num_listed, key, nth, TILE)
    tl.store(tokens + row, tl.where(has_token, token, _NO_TOKEN).to(tl.int64))


@triton.jit
def _uniform(seed, position):
    """Computes the same as philox.uniform."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    word, next_word, _c, _d = tl.philox(seed, low, high, low * 0, low * 0)
    bits = (word.to(tl.uint64) << 32) | next_word.to(tl.uint64)
    return (bits >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _key(logits):
    """Converts logits to int32 keys: a larger logit has a larger key. -0.0 and 0.0 have the same
    key."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit(keys):
    """Converts keys back to logits."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(logits, largest, temperature):
    """Returns the weights of tokens as integers. The most likely token has the weight 2^40."""
    return (tl.exp(tl.div_rn(logits - largest, temperature)) * _UNIT).to(tl.int64)


@triton.jit
def _weight_of_key(key, largest, temperature):
    return tl.maximum(_weight(_logit(key), largest, temperature), 1)


@triton.jit
def _largest(logits, vocab, TILE: tl.constexpr):
    """Returns the largest logit of a row, and the lowest id of the tokens with this logit. A NaN
    counts as the largest."""
    # Of equal logits, the lowest id gives the largest number. Threads compare their own tokens
    # first, so that they wait for each other only once.
    largest_of = tl.full((TILE,), -(1 << 63), tl.int64)
    for start in range(0, vocab, TILE):
        ids = start + tl.arange(0, TILE)
        tile = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
        keys = tl.where(tile == tile, _key(tile), 0x7FFFFFFF)  # the key of a NaN may be the lowest
        numbers = (keys.to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))
        largest_of = tl.maximum(largest_of, tl.where(ids < vocab, numbers, -(1 << 63)))
    number = tl.max(largest_of, 0)
    token = (0xFFFFFFFF - (number & 0xFFFFFFFF)).to(tl.int32)
    return _logit((number >> 32).to(tl.int32)), token


@triton.jit
def _level_keys(largest, temperature):
    """Returns the keys of the 8 levels in descending order. Levels are closer together near the
    largest logit. The last level is below all logits."""
    levels = tl.arange(0, _LEVELS)
    depth = (levels + 1).to(tl.float32) / _LEVELS
    keys = _key(largest - temperature * _DEEPEST * depth * depth)
    return tl.where(levels == _LEVELS - 1, -2147483648, keys)


@triton.jit
def _measure_levels(logits, vocab, largest, temperature, min_p, levels, TILE: tl.constexpr):
    """Returns, for each level, the number and the total weight of the tokens at or above the level.
    Also returns the number and the total weight of the tokens that min_p keeps."""
    # Threads sum over their own tokens first, so that they wait for each other only at the end.
    counts = tl.zeros((TILE, _LEVELS), tl.int32)
    masses = tl.zeros((TILE, _LEVELS), tl.int64)
    num_left = tl.zeros((TILE,), tl.int64)
    mass_left = tl.zeros((TILE,), tl.int64)
    for start in range(0, vocab, TILE):
        ids = start + tl.arange(0, TILE)
        tile = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
        is_left = (ids < vocab) & (tl.exp(tl.div_rn(tile - largest, temperature)) >= min_p)
        num_left += is_left.to(tl.int64)
        mass_left += tl.where(is_left, _weight(tile, largest, temperature), 0)
        column = tile[:, None]
        is_above = (_key(column) >= levels[None, :]) & (ids < vocab)[:, None]
        counts += is_above.to(tl.int32)
        masses += tl.where(is_above, _weight(column, largest, temperature), 0)
    counts = tl.sum(counts.to(tl.int64), 0)
    num_left, mass_left = _sums(num_left, mass_left)
    return counts, tl.sum(masses, 0), num_left, mass_left


@triton.jit
def _sums(first, second):
    """Returns the sums of two tensors. The threads wait for each other only once."""
    return tl.split(tl.sum(tl.join(first, second), 0))


@triton.jit
def _find(
    row_of,
    levels,
    counts,
    masses,
    target,
    by_count,
    LIST_TILE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Finds a threshold: the largest key for which more than `target` tokens have this key or a
    larger one. With `target` 49, this is the key of the 50th token. If `by_count` is false, the
    total weight of these tokens must be more than `target`, instead of their number.

    Returns (key, number of tokens above the key, total weight of these tokens, number of listed
    tokens). All tokens with the key are listed (`_list_keys`). The number or total weight of all
    tokens must be above the target.
    """
    logits, listed_ids, _vocab, largest, temperature = row_of
    measures = tl.where(by_count, counts, masses)
    indices = tl.arange(0, _LEVELS)
    level = tl.sum((measures <= target).to(tl.int32), 0)
    low = tl.sum(tl.where(indices == level, levels, 0), 0)
    high = tl.sum(tl.where(indices == level - 1, levels, 0), 0).to(tl.int64)
    high = tl.where(level == 0, 1 << 31, high)  # upper bound of the listed keys, exclusive
    above = tl.sum(tl.where(indices == level - 1, counts, 0), 0)
    mass_above = tl.sum(tl.where(indices == level - 1, masses, 0), 0)

    num_listed = _list_keys(row_of, low, high, LIST_TILE)

    # Each iteration finds three more bits of the key, from the highest to the lowest. Of the eight
    # possible keys, it takes the largest one for which the tokens at or above are more than
    # `target`. All eight are measured at once, because the threads wait for each other at each sum.
    found = tl.zeros((), tl.int64)  # the key found so far, plus 2^31
    for turn in range(11):
        step = tl.full((), 1, tl.int64) << (30 - 3 * turn)
        candidates = found + step * indices
        measured = tl.zeros((TILE, _LEVELS), tl.int64)
        for start in range(0, num_listed, TILE):
            places = start + tl.arange(0, TILE)
            _ids, keys = _listed(logits, listed_ids, places, num_listed)
            keys = keys[:, None]
            amounts = tl.where(by_count, 1, _weight(_logit(keys), largest, temperature))
            is_above = keys.to(tl.int64) + 2147483648 >= candidates[None, :]
            measured += tl.where(is_above & (places < num_listed)[:, None], amounts, 0)
        measures = tl.where(by_count, above, mass_above) + tl.sum(measured, 0)
        # The first candidate is enough in any case.
        found += (tl.sum((measures > target).to(tl.int64), 0) - 1) * step
    key = (found - 2147483648).to(tl.int32)

    num_above = tl.zeros((TILE,), tl.int64)
    weights_above = tl.zeros((TILE,), tl.int64)
    for start in range(0, num_listed, TILE):
        places = start + tl.arange(0, TILE)
        _ids, keys = _listed(logits, listed_ids, places, num_listed)
        is_above = (places < num_listed) & (keys > key)
        num_above += is_above.to(tl.int64)
        weights_above += tl.where(is_above, _weight(_logit(keys), largest, temperature), 0)
    num_above, weights_above = _sums(num_above, weights_above)
    return key, above + num_above, mass_above + weights_above, num_listed


@triton.jit
def _list_keys(row_of, low, high, TILE: tl.constexpr):
    """Lists the tokens whose keys are at least `low` and less than `high`: writes their ids to the
    row's buffer `listed_ids`. Returns their number."""
    logits, listed_ids, vocab, _largest, _temperature = row_of
    # The sums at the end of `_find` have made all threads wait until each has read the tokens that
    # an earlier call listed.
    num_listed = 0
    for start in range(0, vocab, TILE):
        ids = start + tl.arange(0, TILE)
        keys = _key(tl.load(logits + ids, mask=ids < vocab, other=float("-inf")))
        is_listed = (ids < vocab) & (keys >= low) & (keys < high)
        places = num_listed + tl.cumsum(is_listed.to(tl.int32), 0) - 1
        tl.store(listed_ids + places, ids, mask=is_listed)
        num_listed += tl.sum(is_listed.to(tl.int32), 0)
    tl.debug_barrier()  # makes the listed tokens visible to all threads
    return num_listed


@triton.jit
def _listed(logits, listed_ids, places, num_listed):
    """Returns the ids and the keys of listed tokens."""
    is_listed = places < num_listed
    ids = tl.load(listed_ids + places, mask=is_listed, other=0)
    return ids, _key(tl.load(logits + ids, mask=is_listed, other=0.0))


@triton.jit
def _nth_with_key(logits, listed_ids, num_listed, key, nth, TILE: tl.constexpr):
    """Returns the id of the nth listed token with this key, counted from 0. If there are fewer,
    returns the last one."""
    token = 0
    seen = tl.zeros((), tl.int64)
    for start in range(0, num_listed, TILE):
        places = start + tl.arange(0, TILE)
        is_listed = places < num_listed
        ids, keys = _listed(logits, listed_ids, places, num_listed)
        is_equal = is_listed & (keys == key)
        order = seen + tl.cumsum(is_equal.to(tl.int64), 0) - 1
        # The order never falls, so its maximum is that of the last token.
        ids = tl.where(is_equal & (order <= nth), ids, 0).to(tl.int64)
        id_max, order_max = tl.split(tl.max(tl.join(ids, order), 0))
        token = tl.maximum(token, id_max.to(tl.int32))
        seen = order_max + 1
    return token
