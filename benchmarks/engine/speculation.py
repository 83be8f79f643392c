"""Measures speculative decoding against plain decoding: edits of code and echoes of JSON, whose
text is in the prompt, and random text. Also scores proposals for recorded tool loops
(tool_loops.py).

    python -m benchmarks.engine.speculation [--tokens 128] [--repeats 3] [--batches 1,32]
    python -m benchmarks.engine.speculation --draft-layers 2 --batches 1

Both engines run in turn, and forget the answers of a run before the next one: otherwise, the
second run would find its whole answer in the first. For each case, the benchmark prints the ratio
of their speeds, the tokens of each step and sequence, the relative time of a step, and the share of
tokens inside repeats. It fails if their tokens differ.

With `--draft-layers`, a draft model proposes the tokens: the first layers of the model itself. Few
layers show what a draft model costs that gains nothing. With all layers, all proposals would be
accepted, but the draft model takes as long as the model, so it is tried and not used.
"""

import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path

from safetensors.torch import load_file, save_file

from benchmarks.engine.tool_loops import read_turns, replay
from benchmarks.shared.engines import drained, first_tokens, make_engine, sequence
from tandem.common.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.types import SequenceSpec
from tandem.models.gguf.export import export
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem_bench.framework import in_turn, options, run_main


@options
class Options:
    model: str = "smollm2"
    tokens: int = 128
    """Tokens of each answer."""
    repeats: int = 3
    threads: int = 2
    batches: str = "1,32"
    samplings: str = "0/1,1/1,1/0.5"
    """Pairs of temperature and top_p. At temperature 1, SmolLM2 copies only with a small top_p."""
    speculative_config: str = "auto"
    draft_layers: int = 0
    """Layers of the draft model. 0: no draft model."""
    draft_tokens: int = 4
    """Largest number of tokens that the draft model proposes."""


def code_edit(number: int) -> str:
    """A class, and the same class again from its first line on."""
    rng = random.Random(number)
    fields = [f"{rng.choice(('first', 'last', 'next'))}_{rng.randrange(100)}" for _ in range(6)]
    lines = [f"class Shape{number}:", "    def __init__(self):"]
    lines += [f"        self.{field} = {rng.randrange(1000)}" for field in fields]
    for field in fields:
        lines += ["", f"    def get_{field}(self):", f"        return self.{field}"]
    code = "\n".join(lines)
    return f"{code}\n\n# The same class again:\n\n{code[: code.index('    def get')]}"


def json_echo(number: int) -> str:
    """A JSON document, and the same document again from its first records on."""
    rng = random.Random(number)
    records = [
        {"id": rng.randrange(10**6), "name": f"user{rng.randrange(1000)}", "ok": rng.random() < 0.5}
        for _ in range(12)
    ]
    lines = [json.dumps(record) for record in records]
    return "\n".join([*lines, "", "Copy of the records:", "", *lines[:3], ""])


def random_text(number: int) -> str:
    rng = random.Random(number)
    words = "river stone quiet amber walks under seven lamps while clouds gather above old towns"
    return " ".join(rng.sample(words.split(), 10))


CASES = {"code edit": code_edit, "json echo": json_echo, "random text": random_text}


# A token is inside a repeat if it and so many tokens before it occurred before.
_REPEATED = 3


def share_in_repeats(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Returns the share of the answer's tokens that are inside repeats of the prompt or the
    answer."""
    tokens = (*prompt, *answer)
    seen: set[tuple[int, ...]] = set()
    num_inside = 0
    for end in range(_REPEATED + 1, len(tokens) + 1):
        run = tokens[end - _REPEATED - 1 : end]
        num_inside += end > len(prompt) and run in seen
        seen.add(run)
    return num_inside / len(answer)


def draft_setting(model: str, num_layers: int, num_tokens: int, folder: Path) -> str:
    """Writes a draft model that has the first layers of a model. Returns the setting with it."""
    whole = export(resolve(model), folder / "whole")
    draft = folder / "draft"
    shutil.copytree(whole, draft, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((whole / "config.json").read_text())
    config["num_hidden_layers"] = min(num_layers, config["num_hidden_layers"])
    (draft / "config.json").write_text(json.dumps(config))
    tensors = load_file(whole / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers
    }
    save_file(kept, draft / "model.safetensors", metadata={"format": "pt"})
    return json.dumps(
        {"method": "draft_model", "model": str(draft), "num_speculative_tokens": num_tokens}
    )


def accepted(engine: Engine) -> str:
    stats = engine.stats().speculation
    if stats is None:
        return "nothing was proposed"
    return f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} proposed tokens are accepted"


class Run:
    """One run of a batch: the tokens, and what they took."""

    def __init__(self, engine: Engine, specs: list[SequenceSpec]) -> None:
        for spec in specs:
            engine.add(spec)
        first_tokens(engine, [spec.sequence_id for spec in specs])
        started = time.perf_counter()
        self.tokens: dict[str, list[int]] = {}
        self.num_steps = 0
        self.num_sequences = len(specs)
        for report in drained(engine):
            self.num_steps += bool(report.num_decode_tokens)
            for new in report.new_tokens:
                self.tokens.setdefault(new.sequence_id.partition("/")[0], []).extend(new.token_ids)
        self.seconds = time.perf_counter() - started

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))


def main(options: Options = Options()) -> None:
    """Prints the score of the tool loops, and a line for each case, temperature and batch."""
    with tempfile.TemporaryDirectory() as folder:
        setting = options.speculative_config
        if options.draft_layers:
            setting = draft_setting(
                options.model, options.draft_layers, options.draft_tokens, Path(folder)
            )
        compare(options, setting)


def compare(options: Options, setting: str) -> None:
    batches = [int(batch) for batch in options.batches.split(",")]
    ways = {"off": "off", "on": setting}
    engines = {
        way: make_engine(
            options.model,
            num_threads=options.threads,
            num_blocks=4096,
            itl_target_s=0.0,
            max_num_seqs=max(batches),
            speculative_config=each,
        )
        for way, each in ways.items()
    }
    tokenizer = Tokenizer(resolve(options.model).path)
    if not options.draft_layers:
        print(f"forty tool loops: {replay(read_turns(tokenizer), setting)}", flush=True)
    turns = count()

    def take_turn(way: str, case: str, temperature: float, top_p: float, batch: int) -> Run:
        turn = next(turns)
        specs = [
            sequence(
                f"{at}/{turn}",
                tokenizer.encode(CASES[case](at)),
                options.tokens,
                SamplingParams(temperature=temperature, top_p=top_p, seed=at),
            )
            for at in range(batch)
        ]
        engines[way].reset_prefix_cache()  # forgets recent answers, too
        return Run(engines[way], specs)

    for batch in batches:
        for sampling in options.samplings.split(","):
            temperature, top_p = map(float, sampling.split("/"))
            for case in CASES:
                calls = {
                    way: partial(take_turn, way, case, temperature, top_p, batch) for way in ways
                }
                taken = in_turn(calls, options.repeats)
                pairs = list(zip(taken["off"], taken["on"], strict=True))
                if any(off.tokens != on.tokens for off, on in pairs):
                    raise SystemExit(f"{case}: the tokens differ")
                ratio = statistics.median(off.seconds / on.seconds for off, on in pairs)
                steps = statistics.median(off.num_steps / on.num_steps for off, on in pairs)
                last = pairs[-1][0]
                inside = statistics.mean(
                    share_in_repeats(tokenizer.encode(CASES[case](int(at))), answer)
                    for at, answer in last.tokens.items()
                )
                print(
                    f"{case}, batch {batch}, temperature {temperature:g}, top_p {top_p:g}: "
                    f"{last.num_tokens / last.seconds:.0f} tokens/s without, ratio {ratio:.2f}; "
                    f"{steps:.2f} tokens per step, relative time of a step {steps / ratio:.2f}; "
                    f"{inside:.0%} of the tokens are inside repeats; "
                    f"so far, {accepted(engines['on'])}",
                    flush=True,
                )


if __name__ == "__main__":
    run_main(main)
