"""Sequences of models with sparse attention give the tokens of transformers, whether their KV is
computed, cached, copied or pulled. The indexers of the tiny models choose 24 tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tandem.common.kv_budget import KvBudget
from tandem.engine.engine import Engine
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.types import Mode
from tandem.errors import BadRequest
from tandem.models.folder import ModelFolder
from tests.engine_driver import drive_all, make_spec
from tests.model_engines import make_model_engine
from tests.tiny_models import make_tiny_model
from tests.unit.engine.test_states import Oracle
from tests.unit.engine.tiny_runs import prefill_elsewhere, specs_of

NUM_TOKENS = 20
_PROMPT = torch.randint(0, 203, (300,), generator=torch.Generator().manual_seed(1)).tolist()


@dataclass(frozen=True)
class Tiny:
    folder: ModelFolder
    oracle: Oracle
    kernels: str

    def make(self, **settings: Any) -> tuple[Engine, ModelRunner]:
        settings = {"num_blocks": 100, "max_num_seqs": 4, "max_tokens_per_step": 100} | settings
        return make_model_engine(
            self.folder, dtype="float32", block_size=16, kernels=self.kernels, **settings
        )


@pytest.fixture(
    scope="module",
    params=[
        ("glm5", "native"),
        ("minimax-m3", "torch"),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                ("glm5", "torch"),
                ("deepseek-v3.2", "native"),
                ("deepseek-v3.2", "torch"),
            )
        ),
    ],
    ids="-".join,
)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    family, kernels = request.param
    folder, model = make_tiny_model(family, tmp_path_factory.mktemp("model"))
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    return Tiny(folder, Oracle(model), kernels)


@pytest.mark.parametrize("tokens_per_step", [7, 100])
def test_a_prompt_resumes_at_each_block(tiny: Tiny, tokens_per_step: int) -> None:
    engine, _ = tiny.make(max_tokens_per_step=tokens_per_step)
    assert tiny.oracle.check(engine, _PROMPT[:200]) == [0]
    assert tiny.oracle.check(engine, _PROMPT[:200]) == [199]
    assert tiny.oracle.check(engine, [*_PROMPT[:100], 5, 6]) == [100]  # copies a part of a block
    assert tiny.oracle.check(engine, *[_PROMPT[:250]] * 4) == [200, 249, 249, 249]


@pytest.mark.parametrize("destroy", [True, False])
def test_cached_index_keys_that_are_zeroed_change_the_tokens(tiny: Tiny, destroy: bool) -> None:
    engine, runner = tiny.make()
    tiny.oracle.check(engine, _PROMPT)
    if destroy:
        index_keys(runner).zero_()
        with pytest.raises(AssertionError):
            tiny.oracle.check(engine, _PROMPT)
    else:
        assert tiny.oracle.check(engine, _PROMPT) == [299]


def test_preempted_sequences(tiny: Tiny) -> None:
    engine, _ = tiny.make(num_blocks=26)
    prompts = [_PROMPT[:100], _PROMPT[100:210], _PROMPT[50:160]]
    specs = [make_spec(f"{i}", prompt, max_tokens=60) for i, prompt in enumerate(prompts)]
    outcome = drive_all(engine, *specs)
    for spec in specs:
        expected = tiny.oracle.tokens(tuple(spec.token_ids), 60)
        assert outcome.token_ids[spec.sequence_id] == expected
    assert sum(end.num_preemptions for end in outcome.ends.values()) > 0


class PoolWithoutIndexKeys:
    """The memory of a pool. Blocks that are stored in it lose the keys of the indexers."""

    def __init__(self, runner: ModelRunner) -> None:
        self._memory = runner.pools[0].memory
        self._keys = index_keys(runner)

    def __setitem__(self, block_ids: Any, blocks: torch.Tensor) -> None:
        self._memory[block_ids] = blocks
        self._keys[block_ids] = 0


@pytest.mark.parametrize("destroy", [True, False])
def test_pulled_index_keys_that_are_zeroed_change_the_tokens(tiny: Tiny, destroy: bool) -> None:
    (source, source_runner), (here, here_runner) = tiny.make(), tiny.make()
    memory: Any = here_runner.pools[0].memory
    outcome, _ = prefill_elsewhere(
        (source, source_runner.pools[0].memory),
        (here, PoolWithoutIndexKeys(here_runner) if destroy else memory),
        lambda mode: specs_of([_PROMPT[:150]], NUM_TOKENS, mode),
    )
    expected = tiny.oracle.tokens(tuple(_PROMPT[:150]), NUM_TOKENS)
    assert (outcome.token_ids["0"] == expected) is not destroy


def test_a_kv_budget_is_refused(tiny: Tiny) -> None:
    engine, _ = tiny.make()
    (spec,) = specs_of([_PROMPT], NUM_TOKENS, Mode.LOCAL, budget=KvBudget(64, 4))
    with pytest.raises(BadRequest, match="the model has sparse attention"):
        engine.add(spec)


def index_keys(runner: ModelRunner) -> torch.Tensor:
    """Returns the bytes of the indexers' keys, [num_blocks, bytes]."""
    pool = runner.pools[0]
    return pool.memory[:, pool.layout.num_kv_heads * pool.layout.head_bytes :]
