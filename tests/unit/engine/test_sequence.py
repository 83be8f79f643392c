from __future__ import annotations

from tandem.common.block_hash import hash_blocks
from tandem.common.cached_tokens import CachedTokens
from tandem.engine.cache.block_table import BlockTables
from tandem.engine.sequence import Loading, Sequence
from tandem.engine.sequence import finish_reason as reason_of
from tandem.engine.types import Mode
from tests.engine_driver import make_spec

ROOT = b"root of 16 bytes"


def make(num_tokens: int, mode: Mode = Mode.LOCAL, **fields: object) -> Sequence:
    spec = make_spec("a", list(range(num_tokens)), mode=mode, **fields)
    return Sequence.from_spec(spec, arrival=0, block_size=4, chain_root=ROOT)


def finish_reason(sequence: Sequence, max_model_len: int) -> str:
    return reason_of(sequence.spec, sequence.token_ids, max_model_len)


def test_hashes_grow_with_the_tokens() -> None:
    sequence = make(3)
    assert sequence.block_hashes == []
    for token_id in range(3, 13):
        sequence.append(token_id)
        assert sequence.block_hashes == hash_blocks(ROOT, list(range(token_id + 1)), 4)


def hold(sequence: Sequence, block_table: list[int], num_cached_blocks: int) -> None:
    sequence.hold(BlockTables([block_table], [0]), sequence.plan(num_cached_blocks, None))


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    assert [len(make(n).reusable_hashes) for n in (3, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]


def test_blocks_that_are_final() -> None:
    for mode, expected in ((Mode.LOCAL, 1), (Mode.PREFILL_ONLY, 2)):
        sequence = make(6, mode)
        hold(sequence, [0, 1], 0)
        assert sequence.num_final_blocks == 0
        sequence.num_computed_tokens = 5
        assert sequence.num_final_blocks == 1
        sequence.num_computed_tokens = 6
        assert sequence.num_final_blocks == expected


def test_only_the_first_admission_counts_as_cached_and_only_of_the_prompt() -> None:
    sequence = make(12, num_prompt_tokens=6)
    hold(sequence, [0, 1, 2], 2)
    assert (sequence.num_computed_tokens, sequence.cached) == (8, CachedTokens(device=6))
    assert sequence.release_tables().ids == [[0, 1, 2]]
    hold(sequence, [0, 1, 2], 0)
    assert (sequence.num_computed_tokens, sequence.cached) == (0, CachedTokens(device=6))


def test_cached_tokens_are_counted_by_where_their_blocks_came_from() -> None:
    sequence = make(26, prefix_blocks=6)
    sequence.loading = Loading(4)
    hold(sequence, [0, 1, 2, 3, 4, 5, 6], 1)
    assert sequence.cached is None
    sequence.take_loaded(range(1, 4), 1, {"host": 2, "disk": 1})
    assert sequence.cached == CachedTokens(device=4, host=8, disk=4)
    sequence.num_stored_blocks = 4
    sequence.take_prefix(6)
    assert sequence.cached == CachedTokens(device=4, host=8, disk=4, peer=8)
    assert sequence.cached.total == sequence.num_computed_tokens


def test_loaded_blocks_count_once_the_gap_before_them_is_computed() -> None:
    sequence = make(26)
    sequence.loading = Loading(5, computes=True)
    hold(sequence, [0, 1, 2, 3, 4, 5, 6], 1)
    sequence.advance(4)
    sequence.take_loaded(range(3, 5), 1, {"disk": 2})
    assert sequence.cached == CachedTokens(device=4, disk=8)
    assert (sequence.num_computed_tokens, sequence.num_next_tokens) == (8, 4)
    sequence.advance(4)
    assert (sequence.num_computed_tokens, sequence.num_next_tokens) == (20, 6)


def test_loaded_blocks_after_a_gap_are_forgotten_when_a_peer_fills_it() -> None:
    for num_pulled, expected in ((6, (24, 2)), (4, (20, 6)), (2, (8, 4))):
        sequence = make(26, Mode.WAITING_FOR_REMOTE_KV)
        hold(sequence, [0, 1, 2, 3, 4, 5, 6], 1)
        sequence.take_loaded(range(3, 5), 1, {"store": 2})
        sequence.take_prefix(num_pulled)
        assert (sequence.num_computed_tokens, sequence.num_next_tokens) == expected


def test_finish_reasons() -> None:
    sequence = make(4, max_tokens=2, stop_token_ids=[3, 7])
    assert finish_reason(sequence, 100) == ""  # token 3 is the prompt's
    sequence.append(7)
    assert finish_reason(sequence, 100) == "stop"
    sequence.append(8)
    assert finish_reason(sequence, 100) == "length"
    other = make(4, max_tokens=9)
    other.append(1)
    assert (finish_reason(other, 6), finish_reason(other, 5)) == ("", "length")
