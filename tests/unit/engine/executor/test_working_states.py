"""States in bfloat16 and int8: their pool, and the float32 states of running sequences."""

from __future__ import annotations

import pytest
import torch

from tandem.engine.cache.layout.state_layout import StateLayout
from tandem.engine.executor.working_states import WorkingStates, with_working_slots
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.models.config.linear_attention import GatedDelta, ShortConv
from tandem_kernels.state_pool import PackedStatePool, StatePool

_DELTA = GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=16, kernel=4)
DTYPES = ["bfloat16", "int8"]


def make_packed(dtype: str, linear: GatedDelta | ShortConv = _DELTA) -> PackedStatePool:
    layout = StateLayout.of(linear, num_slots=6, num_layers=3, block_size=16, dtype=dtype)
    memory = torch.zeros(layout.num_blocks, layout.block_bytes, dtype=torch.uint8)
    return PackedStatePool(memory, layout)


def make_working(packed: PackedStatePool, num_slots: int) -> StatePool:
    assert isinstance(packed.layout, StateLayout)
    layout = packed.layout.working(num_slots)
    return StatePool(torch.zeros(num_slots, layout.block_bytes, dtype=torch.uint8), layout)


@pytest.mark.parametrize("linear", [_DELTA, ShortConv(num_outputs=16, kernel=3, has_biases=False)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_is_rounded_once(dtype: str, linear: GatedDelta | ShortConv) -> None:
    packed = make_packed(dtype, linear)
    pool = make_working(packed, 3)
    pool.memory.view(torch.float32).normal_(generator=torch.Generator().manual_seed(1))
    matrices, convs = pool.parts(1)
    matrices[0, 1, 2:3] = 0  # a row without a scale
    matrices *= torch.logspace(-12, 6, matrices.shape[2]).view(-1, 1)
    packed.store(4, pool, 1)
    packed.load(4, pool, 2)
    found, found_convs = pool.parts(2)
    assert torch.equal(found_convs, convs.bfloat16().float())
    if dtype == "bfloat16":
        assert torch.equal(found, matrices.bfloat16().float())
    elif matrices.numel():
        largest = matrices.abs().amax(-1, keepdim=True)
        assert ((found - matrices).abs() <= largest / 253).all()
    packed.store(5, pool, 2)
    assert torch.equal(packed.memory[5], packed.memory[4])
    assert not packed.memory[:4].any()


class Sequences:
    """Sequences whose states count their steps. Each has a slot in the pool."""

    def __init__(self, num_working: int) -> None:
        self.packed = make_packed("bfloat16")
        self.pool = make_working(self.packed, num_working)
        self.states = WorkingStates(self.packed, self.pool)
        self.num_tokens: dict[int, int] = {}

    def step(self, *slots: int, live: set[int], fresh: int = 0) -> list[float]:
        """Computes a token of the sequences with these slots. The last `fresh` of them have no
        token yet. Returns their states."""
        pieces = []
        for number, slot in enumerate(slots):
            before = 0 if number >= len(slots) - fresh else 9
            pieces.append(SequenceSlice([1], before + 1, [], True, other_tables=[[slot]]))
        batch = StepBatch(pieces, live_slots=[frozenset(live)])
        found = []
        for piece in with_working_slots(batch, {1: self.states}).slices:
            (place,) = piece.block_tables[1]
            for part in self.pool.parts(place):
                if piece.context_len == 1:
                    part.zero_()
                part += 1
            found.append(self.pool.parts(place)[0].mean().item())
        return found

    def stored(self, slot: int) -> float:
        """Returns the state of a slot in the pool."""
        spare = make_working(self.packed, 1)
        self.packed.load(slot, spare, 0)
        return spare.parts(0)[0].mean().item()


def test_states_stay_in_working_slots_until_they_are_stored() -> None:
    sequences = Sequences(2)
    assert sequences.step(0, 1, live=set(), fresh=2) == [1, 1]
    assert sequences.step(0, live={0, 1}) == [2]
    assert sequences.stored(0) == sequences.stored(1) == 0
    sequences.states.store(0, 5)  # frozen
    sequences.states.store(0, 0)  # for a peer
    assert sequences.stored(5) == sequences.stored(0) == 2
    assert sequences.step(1, 0, live={0, 1}) == [2, 3]


def test_with_too_few_working_slots_the_state_that_waited_longest_is_stored() -> None:
    sequences = Sequences(2)
    sequences.step(0, live=set(), fresh=1)
    sequences.step(1, live={0}, fresh=1)
    sequences.step(2, live={0, 1}, fresh=1)
    assert [sequences.stored(slot) for slot in (0, 1, 2)] == [1, 0, 0]
    assert sequences.step(0, 2, live={0, 1, 2}) == [2, 2]
    assert sequences.stored(1) == 1
    sequences.states.store(1, 4)  # it has no working slot
    assert sequences.stored(4) == 1


def test_a_sequence_starts_from_its_slot_whatever_an_earlier_one_with_the_slot_has_left() -> None:
    sequences = Sequences(2)
    sequences.step(0, 1, live=set(), fresh=2)
    spare = make_working(sequences.packed, 1)
    for part in spare.parts(0):
        part.fill_(40)
    sequences.packed.store(0, spare, 0)  # a pull, a load or a frozen state
    # The new sequence with slot 0 is not in this step, and slot 1 makes room for slots 2 and 3.
    assert sequences.step(2, 3, live={1}, fresh=2) == [1, 1]
    assert sequences.stored(0) == 40
    assert sequences.step(0, live={1, 2, 3}) == [41]
