"""Engines in this process, for benchmarks that look inside `tandem.LLM`: at steps or at tiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from tandem.common.config.engine import EngineConfig
from tandem.common.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.types import Mode, SequenceSpec, StepReport
from tandem.models.folder import ModelFolder
from tandem.models.grammars.compiler import GrammarCompiler
from tandem.models.source import resolve


def make_engine(model: str | ModelFolder = "smollm2", **options: Any) -> Engine:
    """Returns an engine on the CPU, as a worker makes it; options are those of `EngineConfig`."""
    folder = resolve(model) if isinstance(model, str) else model
    config = EngineConfig(model=str(folder.path), **{"device": "cpu", **options})
    runner = ModelRunner(folder, config)
    return Engine(config, runner, folder.fingerprint, GrammarCompiler.of(folder))


def sequence(
    name: str,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: SamplingParams | None = None,
    **more: Any,
) -> SequenceSpec:
    """Returns a sequence that this engine prefills and decodes; greedy unless `sampling` says
    otherwise."""
    sampled = replace(sampling or SamplingParams(temperature=0), max_tokens=max_tokens)
    return SequenceSpec(name, list(prompt), len(prompt), Mode.LOCAL, sampled, **more)


def drained(engine: Engine) -> Iterator[StepReport]:
    """Yields the reports of steps until the engine has nothing left to do."""
    while engine.has_work():
        yield engine.step()


def first_tokens(engine: Engine, names: Sequence[str]) -> None:
    """Steps until each of these sequences has its first token."""
    waiting = set(names)
    while waiting:
        waiting -= {new.sequence_id for new in engine.step().new_tokens}
