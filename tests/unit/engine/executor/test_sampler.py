from __future__ import annotations

from dataclasses import fields

import torch

from tandem.common.sampling_params import SamplingParams
from tandem.engine.executor.sampler import next_draw
from tandem.engine.sequence import Sequence
from tandem_kernels.sampling import Draw, sample
from tests.engine_driver import make_spec

LOGITS = torch.randn(1, 500, generator=torch.Generator().manual_seed(1))


def sequence_of(num_tokens: int, *, num_output_tokens: int = 0, **sampling: float) -> Sequence:
    spec = make_spec(
        "a",
        list(range(num_tokens)),
        num_prompt_tokens=num_tokens - num_output_tokens,
        sampling=SamplingParams(**{"temperature": 0, **sampling}, is_resolved=True),
    )
    return Sequence.from_spec(spec, arrival=0, block_size=4, chain_root=b"root of 16 bytes")


def sample_next(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    return sample(logits, [next_draw(sequence) for sequence in sequences])


def test_greedy_takes_the_largest() -> None:
    assert sample_next(LOGITS, [sequence_of(3)]) == [int(LOGITS.argmax())]


def test_a_draw_depends_on_the_seed_and_the_index_in_the_whole_sequence() -> None:
    here = sample_next(LOGITS, [sequence_of(9, temperature=1.0, seed=5)])
    moved = sample_next(LOGITS, [sequence_of(9, num_output_tokens=4, temperature=1.0, seed=5)])
    assert here == moved
    others = [sequence_of(n, temperature=1.0, seed=5) for n in range(1, 9)]
    assert len(set(sample_next(LOGITS.repeat(8, 1), others))) > 1
    seeds = [sequence_of(9, temperature=1.0, seed=seed) for seed in range(8)]
    assert len(set(sample_next(LOGITS.repeat(8, 1), seeds))) > 1


def test_a_draw_has_each_sampling_parameter_of_its_name() -> None:
    names = {field.name for field in fields(Draw)} & {*SamplingParams.__struct_fields__}
    values = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 5}
    assert names == values.keys(), "a value for the new field, which is not its default"
    draw = next_draw(sequence_of(4, **values))
    assert {name: getattr(draw, name) for name in names} == values


def test_each_row_has_its_own_parameters() -> None:
    best = [int(i) for i in LOGITS[0].topk(2).indices]
    rows = [sequence_of(4), *(sequence_of(4, temperature=5.0, top_k=2, seed=s) for s in range(20))]
    greedy, *drawn = sample_next(LOGITS.repeat(21, 1), rows)
    assert greedy == best[0]
    assert set(drawn) == set(best)
