"""Decode steps of `--model-impl transformers` beside the library's own model with its DynamicCache.

    python -m benchmarks.engine.transformers_steps [--batch 8] [--context 512] [--threads 2]

The model has SmolLM2's sizes and random weights in float32. Both ways compute the next logits of
the same number of sequences, with as many threads, and take turns. The figure is the median of the
ratios of each turn, with the quartiles beside it. Writes
benchmarks/results/transformers_steps.json.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from random import Random

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.shared.random_models import write_model
from tandem.common.config.engine import EngineConfig
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.models.files import read_json
from tandem.models.source import read_folder, resolve
from tandem_bench.framework import RESULTS, Report, in_turn, options, ratios, run_main, table


@options
class Options:
    batch: int = 8
    context: int = 512
    """Tokens of each sequence, with the one that a step computes."""
    threads: int = 2
    turns: int = 5
    output: Path = RESULTS / "transformers_steps.json"


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    with tempfile.TemporaryDirectory() as path:
        model = make_model(Path(path))
        library = Library(model, options)
        pools = Pools(Path(path), options)
        taken = in_turn({"library": library.step_s, "pools": pools.step_s}, options.turns)
    ratio = ratios(taken["pools"], taken["library"])
    milliseconds = {way: 1000 * statistics.median(each) for way, each in taken.items()}
    report.write(
        batch=options.batch,
        context=options.context,
        threads=options.threads,
        ms=milliseconds,
        ratio=ratio,
    )
    print(
        table(
            "DynamicCache, ms | KV pools, ms | ratio | quartiles",
            [
                (
                    f"{milliseconds['library']:.1f}",
                    f"{milliseconds['pools']:.1f}",
                    f"{ratio.median:.3f}",
                    f"{ratio.low:.3f} to {ratio.high:.3f}",
                )
            ],
        )
    )


def make_model(path: Path) -> PreTrainedModel:
    """Writes the model, with the built-in model's tokenizer."""
    folder = resolve("smollm2").path
    torch.manual_seed(7)
    config = LlamaConfig.from_dict(read_json(folder / "config.json"))
    model = LlamaForCausalLM(config).float().eval()
    write_model(path, model)
    return model


class Library:
    """The library's model with a cache that holds random KV of all tokens but one."""

    def __init__(self, model: PreTrainedModel, options: Options) -> None:
        config = model.config
        shape = options.batch, config.num_key_value_heads, options.context - 1
        size = config.hidden_size // config.num_attention_heads
        self._model = model
        self._tokens = torch.randint(100, 40_000, (options.batch, 1))
        self._cache = DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            self._cache.update(torch.randn(*shape, size), torch.randn(*shape, size), layer)

    @torch.inference_mode()
    def step_s(self) -> float:
        began = time.perf_counter()
        self._model(input_ids=self._tokens, cache=self._cache, logits_to_keep=1)
        taken = time.perf_counter() - began
        self._cache.crop(-1)
        return taken


class Pools:
    """A runner whose pools hold random KV."""

    def __init__(self, path: Path, options: Options) -> None:
        config = EngineConfig(model="", device="cpu", dtype="float32", num_threads=options.threads)
        self._runner = ModelRunner(read_folder(path, model_impl="transformers"), config)
        each = -(-options.context // config.block_size)
        self._runner.allocate(options.batch * each)
        self._runner.kv.view(torch.float32).normal_()
        blocks = list(range(options.batch * each))
        Random(1).shuffle(blocks)
        self._batch = StepBatch(
            [
                SequenceSlice([1000 + i], options.context, blocks[i * each : (i + 1) * each], True)
                for i in range(options.batch)
            ]
        )

    def step_s(self) -> float:
        began = time.perf_counter()
        self._runner.forward(self._batch)
        return time.perf_counter() - began


if __name__ == "__main__":
    run_main(main)
