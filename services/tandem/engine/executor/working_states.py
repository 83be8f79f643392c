"""The states of running sequences in float32, if the slots of the pools have a smaller dtype.

A step computes on a *working slot*, which has the states of one sequence. They stay there from step
to step, so a state is rounded only where it is stored: when it is frozen, when a peer will pull it,
and when another sequence needs the working slot.

    first step of a sequence      slot in the pool --> working slot
    states are frozen             working slot --> frozen slot in the pool
    a peer will pull them         working slot --> slot in the pool
    too few working slots         working slot --> slot in the pool, of the sequence that has waited
                                  longest
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem_kernels.state_pool import PackedStatePool, StatePool


class WorkingStates:
    """The working slots of one state group."""

    def __init__(self, packed: PackedStatePool, pool: StatePool) -> None:
        """`pool` has at least as many slots as a step has sequences."""
        self._packed = packed
        self._pool = pool
        # Slot in the pool -> working slot; the one that was used longest ago comes first. The slot
        # may be that of a sequence that has ended.
        self._places: dict[int, int] = {}
        self._free = list(range(pool.layout.num_blocks - 1, -1, -1))

    @property
    def memory(self) -> torch.Tensor:
        """The pool's slots, uint8 [slots, bytes of a slot]."""
        return self._packed.memory

    def place(self, slices: Sequence[tuple[int, SequenceSlice]], live: frozenset[int]) -> list[int]:
        """Returns the working slots for the slices of a step, each of which comes with its slot in
        the pool.

        `live` are the slots of the sequences that were in earlier steps. Any other slot has the
        states with which its sequence starts.
        """
        for slot in [each for each in self._places if each not in live]:
            self._free.append(self._places.pop(slot))
        # No slot of this step is given to another sequence.
        kept = [self._places.pop(slot, None) for slot, _ in slices]
        found = []
        for (slot, of_step), place in zip(slices, kept, strict=True):
            if place is None:
                place = self._free.pop() if self._free else self._evict()
                if of_step.context_len > of_step.num_tokens:
                    self._packed.load(slot, self._pool, place)
            found.append(place)
        self._places |= {slot: place for (slot, _), place in zip(slices, found, strict=True)}
        return found

    def store(self, slot: int, target: int) -> None:
        """Copies the states of the sequence that has `slot` to the slot `target` of the pool."""
        if slot in self._places:
            self._packed.store(target, self._pool, self._places[slot])
        else:
            self.memory[target].copy_(self.memory[slot])

    def _evict(self) -> int:
        slot = next(iter(self._places))
        place = self._places.pop(slot)
        self._packed.store(slot, self._pool, place)
        return place


def with_working_slots(batch: StepBatch, working: Mapping[int, WorkingStates]) -> StepBatch:
    """Returns a step's batch with working slots in place of slots. `working` has the states of
    each state group."""
    slices = batch.slices
    for live, (group, states) in zip(batch.live_slots, working.items(), strict=True):
        places = states.place([(each.block_tables[group][0], each) for each in slices], live)
        slices = [_with_slot(*each, group) for each in zip(slices, places, strict=True)]
    return replace(batch, slices=slices)


def _with_slot(of_step: SequenceSlice, slot: int, group: int) -> SequenceSlice:
    tables = list(of_step.block_tables)
    tables[group] = [slot]
    return of_step._replace(block_table=tables[0], other_tables=tables[1:])
