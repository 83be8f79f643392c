"""Simulates `--prefill-at auto` with one prefill and one decode worker, beside its choices.

    python -m benchmarks.simulator.decode_at [--seeds 20] [--requests 200]

Workers have the rates of SmolLM2 on one core each. Three mixes of requests arrive by Poisson:

    balanced   as in benchmarks/cluster/goodput.py: chats and, one in four, long prompts
    prompts    long prompts with short answers
    answers    short prompts with long answers

    remote     the prefill worker computes all prompts, and the decode worker decodes
    mixed      two decode workers without a prefill worker: a request decodes where it is prefilled
    auto       as `remote`, and the prefill worker also decodes, and the decode worker also prefills

100% load is what two mixed workers carry. Goodput is the share of requests with a TTFT of at most
1 s plus twice that of the prompt alone, and a mean ITL of at most `--itl`. Writes
benchmarks/results/simulator_decode_at.json. Exit status 1 if the goodput of `auto` is more than 3
points below the better of the others in a mean over the seeds.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.simulator.overload import BLOCK, PAIR, RATES
from tandem.ops.simulator.output.report import summarize
from tandem.ops.simulator.policies import make_policy
from tandem.ops.simulator.scenario import Scenario, Slo, full_load_factor
from tandem.ops.simulator.simulation import Simulation
from tandem.ops.simulator.traces import Arrival, scale_load
from tandem.router.admission.predict import TtftLimit
from tandem_bench.framework import RESULTS, options, run_main, table, write

LOADS = (0.3, 0.6, 0.8, 1.0)
BELOW_MAX = 3.0  # points of goodput
WAIT_S = 1.0
CHAT, LONG = ((64, 256), (32, 96)), ((1000, 1800), (16, 48))  # tokens of (prompt, answer)
MIXES = {
    "balanced": (CHAT, CHAT, CHAT, LONG),
    "prompts": (LONG,),
    "answers": (((32, 128), (150, 350)),),
}
SETUPS: dict[str, dict[str, Any]] = {
    "remote": {"num_prefill": 1, "num_decode": 1, "prefill_at": "remote"},
    "mixed": {"num_prefill": 0, "num_decode": 2},
    "auto": {"num_prefill": 1, "num_decode": 1},
}


@options
class Options:
    seeds: int = 20
    requests: int = 200
    itl: float = 0.1
    output: Path = RESULTS / "simulator_decode_at.json"


def make_mix(name: str, count: int, seed: int) -> list[Arrival]:
    """Poisson arrivals, one a second, without common prefixes."""
    rng = Random(f"{name} {seed}")
    arrivals, at_s, next_block = [], 0.0, 0
    for _ in range(count):
        at_s += rng.expovariate(1.0)
        prompt, answer = rng.choice(MIXES[name])
        num_tokens = rng.randint(*prompt)
        num_blocks = -(-num_tokens // BLOCK)
        ids = tuple(range(next_block, next_block + num_blocks))
        next_block += num_blocks
        arrivals.append(Arrival(at_s, num_tokens, rng.randint(*answer), ids))
    return arrivals


def scenario_of(setup: str, seed: int, itl_s: float) -> Scenario:
    token_s = 2 * RATES.prefill.seconds(1000) / 1000
    return Scenario(
        kv_tokens=64_000,
        rates=RATES,
        pair=PAIR,
        rate_error=0.1,
        sequences_max=64,
        itl_target_s=0.1,
        admission=False,
        slo=Slo(TtftLimit(WAIT_S, token_s), itl_s),
        seed=seed,
        block_size=BLOCK,
        **SETUPS[setup],
    )


def simulate(mix: str, load: float, args: Options) -> dict[str, Any]:
    goodput: dict[str, list[float]] = {}
    stayed = []
    for seed in range(args.seeds):
        arrivals = make_mix(mix, args.requests, seed)
        factor = full_load_factor(scenario_of("mixed", seed, args.itl), arrivals)
        timed = scale_load(arrivals, load * factor)
        for setup in SETUPS:
            simulation = Simulation(
                scenario_of(setup, seed, args.itl), timed, make_policy("tandem")
            )
            simulation.run()
            report = summarize(simulation, "tandem", load)
            goodput.setdefault(setup, []).append(100 * report.goodput)
            if setup == "auto":
                on_prefill = [r.decode and r.decode.role == "prefill" for r in simulation.requests]
                stayed.append(100 * statistics.mean(map(bool, on_prefill)))
    means = {setup: round(statistics.mean(found), 2) for setup, found in goodput.items()}
    return {
        "mix": mix,
        "load": load,
        "goodput": means,
        "below": round(max(means[s] for s in SETUPS if s != "auto") - means["auto"], 2),
        "stayed": round(statistics.mean(stayed), 1),
    }


def main(args: Options = Options()) -> bool:
    began = time.perf_counter()
    rows = [simulate(mix, load, args) for mix in MIXES for load in LOADS]
    settings = {"seeds": args.seeds, "requests": args.requests, "itl_s": args.itl}
    write(args.output, {**settings, "rows": rows})
    cells = (
        [
            r["mix"],
            f"{r['load']:.0%}",
            *(f"{r['goodput'][setup]:.1f}" for setup in SETUPS),
            f"{r['below']:+.1f}",
            f"{r['stayed']:.0f}%",
        ]
        for r in rows
    )
    columns = f"mix | load | {' | '.join(SETUPS)} | better less auto | decoded where prefilled"
    print(table(columns, cells))
    print(f"{time.perf_counter() - began:.0f} s")
    return any(row["below"] > BELOW_MAX for row in rows)


if __name__ == "__main__":
    run_main(main)
