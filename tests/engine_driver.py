"""Drives an Engine in tests: creates one on the toy runner, creates specs, and runs to the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from tandem.common.config.engine import EngineConfig
from tandem.common.sampling_params import SamplingParams
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.cache.pool.block_pool import BlockPool
from tandem.engine.engine import Engine
from tandem.engine.tiers.device.blocks import BlocksInPlace
from tandem.engine.tiers.io_thread import IoThread, JobThread
from tandem.engine.tiers.tiers import Tiers
from tandem.engine.types import Mode, NewTokens, SequenceSpec, StepReport
from tests.toy_runner import ToyRunner

GREEDY = SamplingParams(temperature=0)


def make_engine(
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    max_model_len: int = 1000,
    start_thread: Callable[[str], JobThread] = IoThread,
    draft: ToyRunner | None = None,
    **settings: Any,
) -> tuple[Engine, ToyRunner]:
    settings.setdefault("kv_tier_policy", "lru")  # tiers store all blocks
    settings.setdefault("itl_target_s", 0.0)  # makes steps independent of the clock
    runner = ToyRunner(block_size=block_size, max_model_len=max_model_len)
    runner.draft = draft
    config = EngineConfig(model="toy", block_size=block_size, num_blocks=num_blocks, **settings)
    return Engine(config, runner, "toy", start_thread=start_thread), runner


def no_tiers(pool: BlockPool) -> Tiers:
    layout = KvLayout.of_one(BlockLayout(pool.num_blocks, 1, 1, 1, 1, "float32"))
    blocks = [BlocksInPlace(np.empty((0, 0), np.uint8))]
    return Tiers([pool], layout, blocks, [], unquarantine=pool.unquarantine)


def make_spec(
    sequence_id: str,
    token_ids: list[int],
    *,
    mode: Mode = Mode.LOCAL,
    sampling: SamplingParams = GREEDY,
    max_tokens: int = 5,
    stop_token_ids: list[int] | None = None,
    prompt_logprobs: int | None = None,
    **fields: Any,
) -> SequenceSpec:
    """Returns the spec of a sequence, greedy by default. The named fields of `sampling` are those
    given here."""
    fields.setdefault("num_prompt_tokens", len(token_ids))
    drawn = msgspec.structs.replace(
        sampling,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        prompt_logprobs=prompt_logprobs,
        is_resolved=True,
    )
    return SequenceSpec(
        sequence_id=sequence_id, token_ids=token_ids, mode=mode, sampling=drawn, **fields
    )


@dataclass
class Outcome:
    """The results of an engine, collected from its reports."""

    reports: list[StepReport] = field(default_factory=list)
    token_ids: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, NewTokens] = field(default_factory=dict)

    def take(self, report: StepReport) -> None:
        self.reports.append(report)
        for new in report.new_tokens:
            assert new.sequence_id not in self.ends, f"{new.sequence_id} went on after its end"
            self.token_ids.setdefault(new.sequence_id, []).extend(new.token_ids)
            if new.finish_reason:
                self.ends[new.sequence_id] = new


def drive(engine: Engine, outcome: Outcome | None = None, *, steps_max: int = 1000) -> Outcome:
    """Steps until the engine has no work, and checks its integrity after each step."""
    outcome = outcome or Outcome()
    for _ in range(steps_max):
        if not engine.has_work():
            return outcome
        outcome.take(engine.step())
        engine.check_integrity()
    raise AssertionError(f"the engine still has work after {steps_max} steps")


def drive_all(engine: Engine, *specs: SequenceSpec) -> Outcome:
    for spec in specs:
        engine.add(spec)
    return drive(engine)
