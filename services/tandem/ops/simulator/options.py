"""The options of `tandem simulate`. The simulated cluster, the arrivals of requests and the loads
are made from the options."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from tandem.common.config.autoscale import AutoscaleConfig
from tandem.common.config.engine import KvTierPolicy
from tandem.common.kv_tiers import DISK, HOST, STORE
from tandem.common.options import Count, NotNegative, Options, Positive, Seconds, Switch, Text
from tandem.common.perf_model.rates import TierRate, WorkerRates
from tandem.ops.simulator.policies import POLICIES
from tandem.ops.simulator.scenario import DEFAULT_RATES, KNOWN_IN_STORE, Fault, Scenario, Slo
from tandem.ops.simulator.traces import (
    BLOCK_SIZE,
    Arrival,
    lay_on_day,
    read_trace,
    rename_prefixes,
    shift_time,
)
from tandem.router.admission.predict import TtftLimit


class UsageError(ValueError):
    """An option has an invalid value."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(Options):
    """`tandem simulate` replays a trace on simulated workers, to compare policies and sizes."""

    trace: Path = field(kw_only=False)
    """Trace of requests: Mooncake's .jsonl or Azure's .csv."""
    decode: Count = 8
    """Number of decode workers."""
    prefill: Count = 0
    """Number of prefill workers. 0: decode workers also prefill."""
    kv_tokens: Positive = 3_000_000
    """Number of tokens in each worker's KV pool."""
    block_size: Positive = BLOCK_SIZE
    """Number of tokens in a block of the trace. Blocks of Mooncake's traces have 512."""
    kv_host_memory: Count = 0
    """Host memory of each worker for copies of KV blocks, in bytes. 0: none."""
    kv_disk_size: Count = 0
    """Disk space of each worker for copies of KV blocks, in bytes. 0: none."""
    kv_store: Switch = False
    """Simulate an object store for copies of KV blocks, which all workers share."""
    kv_tier_policy: KvTierPolicy = "value"
    """Which blocks are copied to the tiers, and which copies are dropped first, as for `tandem
    worker`."""
    kv_host_rate: NotNegative = 0.0
    """Bytes per second at which a worker loads KV blocks from host memory. 0: the speed in --rates,
    or a built-in default."""
    kv_disk_rate: NotNegative = 0.0
    """Bytes per second at which a worker loads KV blocks from disk. 0: the speed in --rates, or a
    built-in default."""
    kv_store_rate: NotNegative = 0.0
    """Bytes per second at which a worker loads KV blocks from the object store. 0: the speed in
    --rates, or a built-in default."""
    policies: str = "all"
    """Names of placement policies, separated by commas. all: every policy."""
    loads: str = "10,20,30,40,50,60,70,80,90,100,110,120"
    """Loads in percent of what the workers can serve, separated by commas. trace: the recorded
    load."""
    requests: Count = 0
    """Number of requests. A longer trace is cut; a shorter one is extended by copies with other
    prefixes. 0: as recorded."""
    seeds: Positive = 1
    """Number of runs of each policy and load, each with other random numbers."""
    rates: Text = ""
    """JSON file with the measured speeds of a worker. Default: a guess."""
    rate_error: NotNegative = 0.3
    """Largest relative error of the worker speeds that the policies assume, such as 0.3 for 30%."""
    cores: NotNegative = 0.0
    """Number of cores of one machine that all workers share. 0: each worker has its own."""
    report_age: NotNegative = 500.0
    """Age, in ms, of the load reports that the policies use."""
    shift_s: Seconds = 0.0
    """Start the replay this many seconds into the trace; the skipped requests come at its end."""
    rename: Text = ""
    """Text that changes the hashes of all prefixes, so that no prefix matches the original trace.
    Empty: the hashes stay the same."""
    fault: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = ()
    """Fault as SECONDS:WORKER:down or up, such as 60:decode-0:down; may be given several times."""
    slo_ttft: NotNegative = 2000.0
    """Limit for the time to the first token, in ms."""
    slo_ttft_token: NotNegative = 0.2
    """Milliseconds that each prompt token adds to --slo-ttft."""
    slo_tpot: NotNegative = 100.0
    """Limit for the time between two tokens, in ms."""
    pulls: bool = True
    """Workers may pull cached prefixes from other workers."""
    admission: bool = True
    """Refuse requests whose predicted time to the first token exceeds --slo-ttft."""
    day: Count = 0
    """Simulate one day with this many requests and a typical daily load. 0: off."""
    autoscale: Switch = False
    """The pool sizes follow the load, from 1 worker to --prefill and --decode workers."""
    cold_start_s: Seconds = 90.0
    """Seconds from the start of a new worker until it serves requests."""
    out: Text = ""
    """Folder for the results as JSON, PNG and HTML."""

    def names(self) -> tuple[str, ...]:
        """Returns the names of the placement policies to compare. Raises UsageError for an unknown
        name."""
        names = POLICIES if self.policies == "all" else tuple(self.policies.split(","))
        if unknown := set(names) - set(POLICIES):
            raise UsageError(
                f"--policies has unknown names: {', '.join(sorted(unknown))}; allowed are "
                f"{', '.join(POLICIES)}"
            )
        return names

    def shares(self) -> list[float]:
        """Returns the loads to simulate, as fractions of the workers' capacity. 0 is the load of
        the trace as recorded. Raises UsageError."""
        return [_read_load(text) for text in ("trace" if self.day else self.loads).split(",")]

    def scenario(self) -> Scenario:
        """Makes the description of the simulated cluster. Raises UsageError for contradictory
        options, and OSError or MsgspecError if the file of --rates cannot be read."""
        rates = read_rates(self.rates, self.block_size)
        sizes = self._tier_blocks(rates.block_bytes)
        if sizes and rates.windows:
            raise UsageError(
                "--rates: KV cache tiers cannot be simulated for a model with sliding windows; "
                "leave out --kv-host-memory, --kv-disk-size and --kv-store"
            )
        rates = msgspec.structs.replace(rates, tiers=self._tier_rates(rates, sizes))
        scenario = Scenario(
            num_decode=self.decode,
            num_prefill=self.prefill,
            kv_tokens=self.kv_tokens,
            rates=rates,
            tier_blocks=tuple(sizes.values()),
            tier_policy=self.kv_tier_policy,
            block_size=self.block_size,
            rate_error=self.rate_error,
            cores=self.cores,
            report_age_s=self.report_age / 1000,
            pull_prefixes=self.pulls,
            faults=tuple(map(_read_fault, self.fault)),
            admission=self.admission,
            slo=Slo(
                TtftLimit(self.slo_ttft / 1000, self.slo_ttft_token / 1000), self.slo_tpot / 1000
            ),
        )
        for fault in scenario.faults:
            if fault.worker_id not in scenario.roles:
                raise UsageError(
                    f"--fault: there is no worker {fault.worker_id}; the workers are "
                    f"{', '.join(scenario.roles)}"
                )
        return scenario

    def _tier_blocks(self, block_bytes: int) -> dict[str, int]:
        """Returns a dict with the tiers of one worker, fastest first: tier name -> number of
        blocks."""
        sizes = {HOST: self.kv_host_memory, DISK: self.kv_disk_size}
        if not block_bytes and (self.kv_store or any(sizes.values())):
            raise UsageError("--rates: the file must set block_bytes to simulate KV cache tiers")
        for name, size in sizes.items():
            if 0 < size < block_bytes:
                option = "--kv-host-memory" if name == HOST else "--kv-disk-size"
                raise UsageError(
                    f"{option} is {size}; it must be 0 or at least {block_bytes}, the size of one "
                    "KV block in bytes"
                )
        blocks = {name: size // block_bytes for name, size in sizes.items() if size}
        return blocks | ({STORE: KNOWN_IN_STORE} if self.kv_store else {})

    def _tier_rates(self, rates: WorkerRates, names: Iterable[str]) -> tuple[TierRate, ...]:
        measured = {tier.name: tier.block_s for tier in rates.tiers}
        given = {HOST: self.kv_host_rate, DISK: self.kv_disk_rate, STORE: self.kv_store_rate}
        return tuple(
            TierRate(
                name, rates.block_bytes / given[name] if given[name] else measured.get(name, 0.0)
            )
            for name in names
        )

    def arrivals(self) -> list[Arrival]:
        """Reads the trace, and changes it as the options require (--shift, --rename, --day). Raises
        TraceError or OSError."""
        arrivals = read_trace(self.trace)
        if self.shift_s:
            arrivals = shift_time(arrivals, self.shift_s)
        if self.rename:
            arrivals = rename_prefixes(arrivals, self.rename)
        return lay_on_day(arrivals, self.day) if self.day else arrivals

    def autoscaler(self) -> AutoscaleConfig:
        """Makes the configuration of the simulated autoscaler. Raises ConfigError."""
        return AutoscaleConfig(
            mode="on",
            prefill_min=min(1, self.prefill),
            prefill_max=self.prefill,
            decode_max=self.decode,
            ttft_s=self.slo_ttft / 1000,
            ttft_token_s=self.slo_ttft_token / 1000,
            itl_s=self.slo_tpot / 1000,
            cold_start_s=self.cold_start_s,
        )


def read_rates(path: str, block_size: int = BLOCK_SIZE) -> WorkerRates:
    """Reads the rates of a worker from a JSON file. If `path` is "", returns DEFAULT_RATES, which
    are a guess. Raises OSError or MsgspecError."""
    if not path:
        block_bytes = DEFAULT_RATES.block_bytes * block_size // BLOCK_SIZE
        return msgspec.structs.replace(DEFAULT_RATES, block_bytes=block_bytes)
    rates = msgspec.json.decode(Path(path).read_bytes(), type=WorkerRates)
    return msgspec.structs.replace(rates, measured=True)


def _read_load(text: str) -> float:
    if text == "trace":
        return 0.0
    try:
        share = float(text) / 100
    except ValueError:
        share = 0.0
    if share <= 0:
        raise UsageError(f"--loads: {text!r} is neither a percentage above 0 nor 'trace'")
    return share


def _read_fault(text: str) -> Fault:
    parts = text.split(":")
    try:
        at_s = float(parts[0])
        worker_id = parts[1]
        state = parts[2]
    except (ValueError, IndexError):
        raise UsageError(
            f"--fault: {text!r} is not SECONDS:WORKER:down or SECONDS:WORKER:up"
        ) from None
    if state == "down":
        return Fault(at_s, worker_id, "down")
    if state == "up":
        return Fault(at_s, worker_id, "up")
    raise UsageError(f"--fault: {text!r} must end with :down or :up")
