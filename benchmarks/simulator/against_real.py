"""The simulator against a real 2P2D cluster of SmolLM2 on this machine.

    python -m benchmarks.simulator.against_real --calibrate     # the real workers' rates, alone
    python -m benchmarks.simulator.against_real --predict       # commit what this writes, and then
    python -m benchmarks.simulator.against_real --measure       # the same requests, for real

--calibrate  starts the cluster, sends prompts one after another until the workers have measured
             themselves, then batches to decode, and takes their rates and pairs from their records,
             as the router does. What a lone first token takes beyond the model is the overhead of
             HTTP, router and worker. Then sends a burst of other requests of the mix: how many
             cores the workers share is what makes the simulated burst take as long.
             -> results/simulator_calibration.json
--predict    simulates the mix at 30%, 60% and 90% of the load that the calibrated workers can
             carry -> results/simulator_predictions.json
--measure    sends the same mix at the same times through the router's HTTP, each run with other
             tokens in its blocks (so nothing is cached from the run before), and prints predicted
             and measured medians, the error and the spread from run to run
             -> results/simulator_against_real.json

The mix is `small_mix.py`'s. The machine must be quiet: load averages are written down.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.shared.cluster import Cluster, up
from benchmarks.shared.requests import client_of
from benchmarks.simulator.small_mix import BLOCK, make_mix, replay, send
from tandem.common.perf_model.rates import DecodeRate, PairRate, PrefillRate, WorkerRates
from tandem.net.store.client import connect
from tandem.net.store.registry import Registry, WorkerRecord
from tandem.ops.simulator.output.report import summarize
from tandem.ops.simulator.policies import make_policy
from tandem.ops.simulator.scenario import Scenario, Slo, full_load_factor
from tandem.ops.simulator.simulation import Simulation
from tandem.ops.simulator.traces import Arrival, scale_load
from tandem.router.admission.predict import TtftLimit
from tandem_bench.framework import RESULTS, options, read, run_main, write

CALIBRATION = Path("simulator_calibration.json")
PREDICTIONS = Path("simulator_predictions.json")
MEASURED = Path("simulator_against_real.json")
POOL = 2  # workers of each role
NUM_BLOCKS = 4000
SEQUENCES_MAX = 8  # a step's decode batch: small, so that 100% load is one that CPUs reach
LOADS = (0.3, 0.6, 0.9)
SIMULATED_RUNS = 20
RECORDS_SHOW_S = 3.0  # after that, what was measured is in them
OPTIONS = ("--num-blocks", str(NUM_BLOCKS), "--max-num-seqs", str(SEQUENCES_MAX))


class Calibration(msgspec.Struct):
    rates: WorkerRates  # the middle of the four workers'
    pair: PairRate
    cores: float  # so many times faster are all workers together than one alone
    overhead_s: float  # of a first token, beyond the model
    load_average: tuple[float, float, float]


def running_cluster() -> AbstractContextManager[Cluster]:
    return up("--prefill", str(POOL), "--decode", str(POOL), *OPTIONS)


async def read_records(cluster: Cluster) -> list[WorkerRecord]:
    config = cluster.config()
    async with connect(config.redis_url) as redis:
        return await Registry(redis, config).read()


async def calibrate(cluster: Cluster, rounds: int) -> Calibration:
    mix = make_mix(8 * rounds, seed=1000)
    async with client_of(cluster.url) as client:
        for n, arrival in enumerate(mix):  # alone
            await send(client, arrival, f"alone {n}")
        # What is measured from here on shares the cores: the simulator adds that by itself.
        await asyncio.sleep(RECORDS_SHOW_S)
        prefill = middle_prefill(await read_records(cluster))
        for n in range(rounds):  # batches of growing size: what one more sequence costs
            batch = [Arrival(0.0, 40, 40, (n, 1 + n, 2 + n))] * (1 + n % (2 * SEQUENCES_MAX))
            await asyncio.gather(*(send(client, a, f"b{n} {i}") for i, a in enumerate(batch)))
        await asyncio.sleep(RECORDS_SHOW_S)
        records = await read_records(cluster)
        rates = middle_rates(records, prefill)
        pair = middle_pair([p for r in records for p in r.pairs.values()])
        overheads = []
        for n in range(rounds):
            lone = Arrival(0.0, 150 + 20 * (n % 10), 4, tuple(range(50)))
            seen = await send(client, lone, f"lone {n}")
            overheads.append(seen.ttft_s - simulate_alone(rates, pair, lone))
    alone = Calibration(rates, pair, float(2 * POOL), statistics.median(overheads), os.getloadavg())
    cores = cores_of(alone, *await measure_burst(cluster, rounds))
    return msgspec.structs.replace(alone, cores=cores)


async def measure_burst(cluster: Cluster, rounds: int) -> tuple[list[Arrival], float]:
    """Requests of the mix that come all at once, and the seconds until the last has ended."""
    burst = [replace(arrival, at_s=0.0) for arrival in make_mix(6 * rounds, seed=3000)]
    began = time.perf_counter()
    await replay(cluster, burst, "burst")
    return burst, time.perf_counter() - began


def cores_of(calibration: Calibration, burst: Sequence[Arrival], took_s: float) -> float:
    """Returns the number of cores with which the simulated burst takes as long as the real one."""
    fewest, most = 0.5, float(2 * POOL)
    for _ in range(12):
        cores = (fewest + most) / 2
        guess = msgspec.structs.replace(calibration, cores=cores)
        simulation = Simulation(scenario_of(guess), burst, make_policy("tandem"))
        simulation.run()
        if max(r.ended_s for r in simulation.requests) > took_s:
            fewest = cores
        else:
            most = cores
    return (fewest + most) / 2


def middle_prefill(records: Sequence[WorkerRecord]) -> PrefillRate:
    """Returns the median of each coefficient."""
    rates = [r.rates.prefill for r in records if r.rates.measured]
    middle = statistics.median
    return PrefillRate(
        middle([r.step_s for r in rates]),
        middle([r.token_s for r in rates]),
        middle([r.token_context_s for r in rates]),
    )


def middle_rates(records: Sequence[WorkerRecord], prefill: PrefillRate) -> WorkerRates:
    """Returns median rates. Only decode workers have measured decoding."""
    decode = [r.rates.decode for r in records if r.role == "decode"]
    middle = statistics.median
    return WorkerRates(
        prefill,
        DecodeRate(middle([r.step_s for r in decode]), middle([r.sequence_s for r in decode])),
        step_tokens=records[0].rates.step_tokens,
        block_bytes=records[0].rates.block_bytes,
        measured=True,
    )


def middle_pair(pairs: Sequence[PairRate]) -> PairRate:
    return PairRate(
        pairs[0].transport,
        statistics.median([p.latency_s for p in pairs]),
        statistics.median([p.bytes_per_s for p in pairs]),
    )


def scenario_of(calibration: Calibration, seed: int = 0) -> Scenario:
    """The real cluster: no hidden errors but those of the model, and nobody is refused early."""
    return Scenario(
        num_decode=POOL,
        num_prefill=POOL,
        kv_tokens=NUM_BLOCKS * BLOCK,
        rates=calibration.rates,
        pair=calibration.pair,
        rate_error=0.0,
        cores=calibration.cores,
        report_age_s=0.0,
        sequences_max=SEQUENCES_MAX,
        admission=False,
        slo=Slo(TtftLimit(60.0), 60.0),
        seed=seed,
        block_size=BLOCK,
    )


def simulate_alone(rates: WorkerRates, pair: PairRate, arrival: Arrival) -> float:
    """Seconds to the first token where nobody else is."""
    alone = Calibration(rates, pair, float(2 * POOL), 0.0, (0.0, 0.0, 0.0))
    simulation = Simulation(scenario_of(alone), [arrival], make_policy("tandem"))
    simulation.run()
    return simulation.requests[0].ttft_s


def predict(calibration: Calibration, count: int) -> dict[str, Any]:
    scenario, mix = scenario_of(calibration), make_mix(count, seed=0)
    rows = []
    for load in LOADS:
        factor = load * full_load_factor(scenario, mix)
        medians = []
        for seed in range(SIMULATED_RUNS):
            simulation = Simulation(
                replace(scenario, seed=seed), scale_load(mix, factor), make_policy("tandem")
            )
            simulation.run()
            report = summarize(simulation, "tandem", load)
            assert report.num_served == count
            medians.append((report.ttft_s["p50"] + calibration.overhead_s, report.tpot_s["p50"]))
        rows.append(
            {
                "load": load,
                "requests_per_s": count / (mix[-1].at_s / factor),
                "factor": factor,
                "ttft_ms": 1000 * statistics.median([m[0] for m in medians]),
                "tpot_ms": 1000 * statistics.median([m[1] for m in medians]),
            }
        )
    return {"requests": count, "rows": rows, "calibration": msgspec.to_builtins(calibration)}


async def measure(cluster: Cluster, predictions: dict[str, Any], runs: int) -> list[dict[str, Any]]:
    mix = make_mix(predictions["requests"], seed=0)
    await replay(cluster, scale_load(make_mix(20, seed=2000), 2.0), "warm")
    rows = []
    for row in predictions["rows"]:
        seen = []
        for number in range(runs):
            before = os.getloadavg()[0]
            one = await replay(cluster, scale_load(mix, row["factor"]), f"{row['load']} {number}")
            seen.append(
                {
                    "ttft_ms": 1000 * statistics.median([s.ttft_s for s in one]),
                    "tpot_ms": 1000 * statistics.median([s.tpot_s for s in one]),
                    "load_average_before": before,
                }
            )
            await asyncio.to_thread(cluster.wait_idle)
        rows.append({"load": row["load"], "predicted": row, "runs": seen})
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    print("load        predicted  measured (median)  error   spread of the runs")
    for row in rows:
        for name in ("ttft_ms", "tpot_ms"):
            runs, predicted = [run[name] for run in row["runs"]], row["predicted"][name]
            median = statistics.median(runs)
            spread = (max(runs) - min(runs)) / median
            print(
                f"{row['load']:4.0%} {name}  {predicted:8.1f}  {median:8.1f}  "
                f"{predicted / median - 1:+15.1%}  {spread:8.1%}"
            )


@options
class Options:
    calibrate: bool = False
    """Measure the real workers' rates, alone."""
    predict: bool = False
    """Simulate the mix."""
    measure: bool = False
    """Send the same requests to real workers."""
    requests: int = 120
    """Requests of the mix."""
    runs: int = 5
    """Real runs of each load."""
    rounds: int = 12
    """Rounds of the calibration."""
    folder: Path = RESULTS
    """Folder that is read and written."""


def main(options: Options = Options()) -> None:
    folder = options.folder
    if options.calibrate + options.predict + options.measure != 1:
        sys.exit("give one of --calibrate, --predict and --measure")
    if options.calibrate:
        with running_cluster() as cluster:
            found = asyncio.run(calibrate(cluster, options.rounds))
        write(folder / CALIBRATION, msgspec.to_builtins(found))
        print(f"cores {found.cores:.2f}, overhead {1000 * found.overhead_s:.1f} ms, {found.rates}")
    elif options.predict:
        text = (folder / CALIBRATION).read_bytes()
        predictions = predict(msgspec.json.decode(text, type=Calibration), options.requests)
        write(folder / PREDICTIONS, predictions)
        for row in predictions["rows"]:
            print(row)
    else:
        predictions = read(folder / PREDICTIONS)
        with running_cluster() as cluster:
            rows = asyncio.run(measure(cluster, predictions, options.runs))
        write(folder / MEASURED, rows)
        show(rows)


if __name__ == "__main__":
    run_main(main)
