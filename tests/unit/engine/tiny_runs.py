"""Requests to engines of a tiny random model: in one engine, and from one to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from tandem.common.kv_budget import KvBudget
from tandem.engine.engine import Engine
from tandem.engine.types import FinalBlocks, Mode, SequenceSpec
from tandem.models.folder import ModelFolder
from tests.engine_driver import Outcome, drive, make_spec
from tests.model_engines import make_model_engine

Tiny = tuple[ModelFolder, PreTrainedModel]
EngineAndKv = tuple[Engine, torch.Tensor]  # the memory of its first pool


def random_prompts(*lengths: int) -> list[list[int]]:
    return [
        torch.randint(0, 203, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        for length in lengths
    ]


def load(
    tiny: Tiny, *, num_blocks: int = 64, step_tokens: int = 512, **settings: object
) -> EngineAndKv:
    settings.setdefault("numerics", "invariant")
    engine, runner = make_model_engine(
        tiny[0], num_blocks=num_blocks, max_tokens_per_step=step_tokens, **settings
    )
    return engine, runner.pools[0].memory


def specs_of(
    prompts: Sequence[list[int]],
    max_tokens: int,
    mode: Mode = Mode.LOCAL,
    *,
    budget: KvBudget | None = None,
) -> list[SequenceSpec]:
    """Returns a request for each prompt, with its number as its name."""
    return [
        make_spec(str(i), prompt, max_tokens=max_tokens, mode=mode, kv_budget=budget)
        for i, prompt in enumerate(prompts)
    ]


def resumed(
    specs: Sequence[SequenceSpec], made: Mapping[str, list[int]], num_made: int
) -> list[SequenceSpec]:
    """Returns the same requests after their first tokens, as another engine gets them."""
    return [
        make_spec(
            spec.sequence_id,
            [*spec.token_ids, *made[spec.sequence_id][:num_made]],
            num_prompt_tokens=spec.num_prompt_tokens,
            max_tokens=spec.sampling.max_tokens,
            kv_budget=spec.kv_budget,
        )
        for spec in specs
    ]


def prefill_elsewhere(
    source_and_kv: EngineAndKv,
    here_and_kv: EngineAndKv,
    specs: Callable[[Mode], list[SequenceSpec]],
) -> tuple[Outcome, dict[str, int]]:
    """Computes prompts in one engine and decodes in another.

    Blocks are copied as soon as they are final, in the middle of the source's step. Returns what
    the other engine made, and how many blocks it reserved for each request.
    """
    (source, source_kv), (here, here_kv) = source_and_kv, here_and_kv
    for spec in specs(Mode.WAITING_FOR_REMOTE_KV):
        here.add(spec)
    outcome = Outcome()
    outcome.take(here.step())
    targets = {r.sequence_id: r.block_ids for r in outcome.reports[0].reserved}
    for spec in specs(Mode.PREFILL_ONLY):
        source.add(spec)

    def pull(final_blocks: list[FinalBlocks]) -> None:
        for final in final_blocks:
            to = targets[final.sequence_id][final.first_block :]
            here_kv[to[: len(final.block_ids)]] = source_kv[final.block_ids]

    while source.has_work():
        report = source.step(pull)
        pull(report.final_blocks)
        for done in report.prefilled:
            source.remove(done.sequence_id)
            outcome.token_ids[done.sequence_id] = [done.first_token_id]
            here.commit(done.sequence_id, done.first_token_id, done.block_sums)
    drive(here, outcome)
    assert sum(report.num_prefill_tokens for report in outcome.reports) == 0
    assert source.load().blocks_used == 0
    return outcome, {name: len(block_ids) for name, block_ids in targets.items()}
