"""Runners and engines of real models, on the CPU unless a test says otherwise."""

from __future__ import annotations

from typing import Any

from tandem.common.config.engine import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.executor.vision_tower import make_image_rows
from tandem.engine.image_rows import ImageRows
from tandem.models.folder import ModelFolder
from tandem.models.grammars.compiler import GrammarCompiler


def make_runner(folder: ModelFolder, **settings: Any) -> ModelRunner:
    return ModelRunner(folder, EngineConfig(**{"model": "", "device": "cpu"} | settings))


def make_model_engine(
    folder: ModelFolder,
    compiler: GrammarCompiler | None = None,
    *,
    images: ImageRows | None = None,
    **settings: Any,
) -> tuple[Engine, ModelRunner]:
    """Makes an engine; what its steps have does not depend on the clock. `images` replaces the
    engine's own vision tower."""
    settings = {"model": "", "device": "cpu", "itl_target_s": 0.0} | settings
    config = EngineConfig(**settings)
    runner = ModelRunner(folder, config)
    images = images or make_image_rows(folder, runner, config)
    return Engine(config, runner, folder.fingerprint, compiler, images=images), runner
