"""A real model in invariant fp32: however a sequence is run, its tokens are the same.

Greedy ones are the reference's (tests/data), sampled ones those of a plain run with the same seed.
Every way asserts that it went that way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence as Many
from copy import copy
from functools import cache
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from tandem.common.config.engine import EngineConfig
from tandem.common.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.types import FinalBlocks, Mode, SequenceSpec
from tandem.models.folder import ModelFolder
from tandem.models.source import resolve
from tests.engine_driver import GREEDY, Outcome, drive, make_spec
from tests.model_engines import make_runner

GOLDEN = Path(__file__).parents[2] / "data" / "golden_smollm2.json"
NUM_TOKENS = 16


@cache
def golden() -> list[tuple[list[int], list[int]]]:
    """Prompts and what follows, shortest first."""
    entries = json.loads(GOLDEN.read_text())["entries"]
    pairs = [(e["prompt_token_ids"], e["greedy_token_ids"]) for e in entries]
    return sorted(pairs, key=lambda pair: len(pair[0]))


@cache
def loaded() -> tuple[ModelFolder, ModelRunner]:
    folder = resolve("smollm2")
    return folder, make_runner(folder, numerics="invariant")


@pytest.fixture(scope="module", autouse=True)
def _weights() -> Iterator[None]:
    """The weights leave memory with the last test."""
    yield
    loaded.cache_clear()


def load(**settings: int) -> Engine:
    return load_with_pool(**settings)[0]


def load_with_pool(
    *, num_blocks: int = 64, block_size: int = 16, budget: int = 512
) -> tuple[Engine, torch.Tensor]:
    """Engines share the weights, and have pools of their own."""
    config = EngineConfig(
        model="smollm2",
        device="cpu",
        numerics="invariant",
        num_blocks=num_blocks,
        block_size=block_size,
        max_tokens_per_step=budget,
        itl_target_s=0.0,  # a step has what the test says, however slow the machine is
    )
    folder, runner = loaded()
    runner = copy(runner)
    runner._block_size = block_size
    return Engine(config, runner, folder.fingerprint), runner.pools[0].memory


def requests(
    *, mode: Mode = Mode.LOCAL, num_prompts: int = 3, salted: bool = False
) -> list[SequenceSpec]:
    """The shortest prompts, each once greedy and once sampled with its own seed. Salted ones share
    no KV."""
    specs = []
    for i, (prompt, _) in enumerate(golden()[:num_prompts]):
        sampled = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, seed=100 + i)
        for kind, sampling in (("greedy", GREEDY), ("sampled", sampled)):
            specs.append(
                make_spec(
                    f"{kind}-{i}",
                    prompt,
                    sampling=sampling,
                    max_tokens=NUM_TOKENS,
                    mode=mode,
                    cache_salt=kind.encode() if salted else b"",
                )
            )
    return specs


@cache
def expected(num_prompts: int = 3) -> dict[str, list[int]]:
    """Returns the tokens of `requests`: the reference's, and for sampled ones those of a plain
    run."""
    tokens = run(load(), requests(num_prompts=num_prompts)).token_ids
    for i, (_, greedy) in enumerate(golden()[:num_prompts]):
        assert tokens[f"greedy-{i}"] == greedy[:NUM_TOKENS]
        assert tokens[f"sampled-{i}"] != greedy[:NUM_TOKENS]
    return tokens


def run(engine: Engine, specs: Many[SequenceSpec]) -> Outcome:
    for spec in specs:
        engine.add(spec)
    outcome = drive(engine)
    assert engine.load().blocks_used == 0
    return outcome


@pytest.mark.parametrize("block_size", [1, 64])
def test_any_block_size(block_size: int) -> None:
    engine = load(num_blocks=1024 // block_size, block_size=block_size)
    assert run(engine, requests()).token_ids == expected()


def test_one_at_a_time_with_nothing_beside_it() -> None:
    engine = load()
    for spec in requests(num_prompts=1):
        assert run(engine, [spec]).token_ids[spec.sequence_id] == expected()[spec.sequence_id]


def test_sixteen_at_once_that_come_and_go_cut_in_chunks() -> None:
    engine = load(budget=32)
    crowd = [
        make_spec(f"other-{i}", golden()[3][0][i : 2 * i + 1], max_tokens=12 + i) for i in range(10)
    ]
    outcome = Outcome()
    for other, spec in zip_longest(crowd, requests()):
        for arriving in filter(None, (other, spec)):
            engine.add(arriving)
        if spec:
            outcome.take(engine.step())
    drive(engine, outcome)
    assert {name: outcome.token_ids[name] for name in expected()} == expected()
    assert any(r.num_prefill_tokens and r.num_decode_tokens for r in outcome.reports)
    assert max(r.num_prefill_tokens + r.num_decode_tokens for r in outcome.reports) <= 32
    assert max(r.load.num_running for r in outcome.reports) == 16


def test_forced_preemption() -> None:
    outcome = run(load(num_blocks=7), requests())
    assert outcome.token_ids == expected()
    assert sum(end.num_preemptions for end in outcome.ends.values()) > 0


def test_a_warm_prefix() -> None:
    engine = load()
    run(engine, requests())
    outcome = run(engine, requests())
    assert outcome.token_ids == expected()
    cached = {name: end.num_cached_tokens for name, end in outcome.ends.items()}
    assert cached == {name: len(golden()[int(name[-1])][0]) - 1 for name in cached}


def test_prefilled_on_another_engine() -> None:
    """Blocks are copied as soon as they are final, in the middle of the source's step, and then it
    forgets them."""
    (source, source_kv), (here, here_kv) = load_with_pool(budget=16), load_with_pool()
    for spec in requests(mode=Mode.WAITING_FOR_REMOTE_KV, salted=True):
        here.add(spec)
    outcome = Outcome()
    outcome.take(here.step())
    assert len(outcome.reports[0].reserved) == 6
    for spec in requests(mode=Mode.PREFILL_ONLY, salted=True):
        source.add(spec)
    num_blocks_moved = 0

    def pull(final_blocks: list[FinalBlocks]) -> None:
        nonlocal num_blocks_moved
        for final in final_blocks:
            table = here.block_ids(final.sequence_id)
            local = table[final.first_block : final.first_block + len(final.block_ids)]
            here_kv[local] = source_kv[final.block_ids]
            num_blocks_moved += len(local)

    while source.has_work():
        report = source.step(pull)
        for done in report.prefilled:
            source.remove(done.sequence_id)
            outcome.token_ids[done.sequence_id] = [done.first_token_id]
            here.commit(done.sequence_id, done.first_token_id)
    assert num_blocks_moved == sum(len(here.block_ids(s.sequence_id)) for s in requests())
    assert drive(here, outcome).token_ids == expected()
    assert source.load().blocks_used == here.load().blocks_used == 0
    assert sum(r.num_prefill_tokens for r in outcome.reports) == 0


@pytest.mark.parametrize("mode", [Mode.LOCAL, Mode.PREFILL_ONLY])
def test_a_prefix_from_another_engine(mode: Mode) -> None:
    """All but the last blocks come from an engine that held them; the rest is computed after them,
    to the same bits of KV and the same tokens."""
    prompt = golden()[3][0]
    num_blocks = (len(prompt) - 1) // 4 - 1
    assert num_blocks >= 2
    source, source_kv = load_with_pool(block_size=4)
    here, here_kv = load_with_pool(block_size=4)
    spec = make_spec("a", prompt, mode=mode, max_tokens=NUM_TOKENS, prefix_blocks=num_blocks)
    block_hashes = computed_chain(source, prompt)
    source.hold_prefix("chain", block_hashes)
    held = source.step().final_blocks[0].block_ids
    here.add(spec)
    [reserved] = here.step().reserved
    here_kv[reserved.block_ids[:num_blocks]] = source_kv[held[:num_blocks]]
    here.continue_prefill("a", num_blocks)
    outcome = drive(here)
    assert sum(r.num_prefill_tokens for r in outcome.reports) == len(prompt) - 4 * num_blocks
    if mode is Mode.LOCAL:
        assert outcome.token_ids["a"] == golden()[3][1][:NUM_TOKENS]
        return
    assert outcome.reports[-1].prefilled[0].first_token_id == golden()[3][1][0]
    num_full = len(prompt) // 4
    table = here.block_ids("a")[:num_full]
    assert torch.equal(here_kv[table], source_kv[held[:num_full]])


def computed_chain(engine: Engine, prompt: list[int]) -> list[bytes]:
    """Computes the prompt; the hashes of its full blocks, root to leaf."""
    engine.add(make_spec("warm", prompt, max_tokens=1))
    reports = drive(engine).reports
    return [stored.block_hash for report in reports for stored in report.stored]


def test_moved_in_the_middle() -> None:
    """Another engine goes on from the tokens made so far, as after a lost worker."""
    specs = []
    for spec in requests():
        made = expected()[spec.sequence_id][:7]
        specs.append(
            make_spec(
                spec.sequence_id,
                spec.token_ids + made,
                num_prompt_tokens=spec.num_prompt_tokens,
                sampling=spec.sampling,
                max_tokens=NUM_TOKENS,
            )
        )
    tokens = run(load(), specs).token_ids
    assert tokens == {name: made[7:] for name, made in expected().items()}


@pytest.mark.slow
def test_all_prompts_to_their_end_in_a_crowd() -> None:
    engine = load(num_blocks=160, budget=128)
    specs = [
        make_spec(f"{copy}-{i}", prompt, max_tokens=len(greedy))
        for copy in range(2)
        for i, (prompt, greedy) in enumerate(golden())
    ]
    outcome = run(engine, specs)
    for spec in specs:
        assert outcome.token_ids[spec.sequence_id] == golden()[int(spec.sequence_id[-1])][1]
