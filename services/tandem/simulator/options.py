"""The options of `tandem simulate`, and what is read for them: scenario, arrivals, loads."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from tandem.config.autoscale import AutoscaleConfig
from tandem.options import Count, NotNegative, Options, Positive, Seconds, Switch, Text
from tandem.perf_model.rates import WorkerRates
from tandem.router.admission.predict import TtftLimit
from tandem.simulator.policies import POLICIES
from tandem.simulator.scenario import DEFAULT_RATES, Fault, Scenario, Slo
from tandem.simulator.traces import Arrival, lay_on_day, read_trace, rename_prefixes, shift_time


class UsageError(ValueError):
    """An option that cannot be taken."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(Options):
    """`tandem simulate` replays a trace on simulated workers, to compare policies and sizes."""

    trace: Path = field(kw_only=False)
    """Trace of requests: Mooncake's .jsonl or Azure's .csv."""
    decode: Count = 8
    """Number of decode workers."""
    prefill: Count = 0
    """Number of prefill workers. 0: decode workers prefill themselves."""
    kv_tokens: Positive = 3_000_000
    """Number of tokens in each worker's KV cache."""
    policies: str = "all"
    """Names of placement policies, with commas between them, or all."""
    loads: str = "10,20,30,40,50,60,70,80,90,100,110,120"
    """Loads in percent of what the workers can carry, or 'trace': as recorded."""
    requests: Count = 0
    """Number of requests: the trace is cut, or renamed copies are added. 0: as recorded."""
    seeds: Positive = 1
    """Number of paired runs of each policy and load."""
    rates: Text = ""
    """JSON file of WorkerRates. Default: a guess."""
    rate_error: NotNegative = 0.3
    """Largest relative error of the rates that policies know."""
    cores: NotNegative = 0.0
    """Number of cores of one machine that all workers share. 0: each worker has its own."""
    report_age: NotNegative = 500.0
    """Age of the load that workers report, in ms."""
    shift_s: Seconds = 0.0
    """Seconds into the trace to start at."""
    rename: Text = ""
    """Name that gives all prefixes of the trace other hashes."""
    fault: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = ()
    """Fault as SECONDS:WORKER:down or up, such as 60:decode-0:down; may be given several times."""
    slo_ttft: NotNegative = 2000.0
    """Service level of the time to first token, in ms."""
    slo_ttft_token: NotNegative = 0.2
    """Milliseconds that each prompt token adds to it."""
    slo_tpot: NotNegative = 100.0
    """Service level of the time to each next token, in ms."""
    pulls: bool = True
    """Workers may pull prefixes from those that hold them."""
    admission: bool = True
    """Requests that would miss the service level are refused early, under every policy."""
    day: Count = 0
    """Number of requests that are laid on a day's curve. 0: off."""
    autoscale: Switch = False
    """The pools follow the load, from 1 worker to --prefill and --decode."""
    cold_start_s: Seconds = 90.0
    """Seconds until an added worker serves."""
    out: Text = ""
    """Folder for JSON, PNG and HTML."""

    def names(self) -> tuple[str, ...]:
        """The policies. Raises UsageError."""
        names = POLICIES if self.policies == "all" else tuple(self.policies.split(","))
        if unknown := set(names) - set(POLICIES):
            raise UsageError(f"no policy {', '.join(sorted(unknown))}; there are {POLICIES}")
        return names

    def shares(self) -> list[float]:
        """The loads, 1.0 what the workers can carry; 0: as recorded. Raises UsageError."""
        return [_read_load(text) for text in ("trace" if self.day else self.loads).split(",")]

    def scenario(self) -> Scenario:
        """Raises UsageError, OSError, MsgspecError."""
        scenario = Scenario(
            num_decode=self.decode,
            num_prefill=self.prefill,
            kv_tokens=self.kv_tokens,
            rates=read_rates(self.rates),
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
                    f"--fault: no worker {fault.worker_id}: there are {scenario.roles}"
                )
        return scenario

    def arrivals(self) -> list[Arrival]:
        """Raises TraceError, OSError."""
        arrivals = read_trace(self.trace)
        if self.shift_s:
            arrivals = shift_time(arrivals, self.shift_s)
        if self.rename:
            arrivals = rename_prefixes(arrivals, self.rename)
        return lay_on_day(arrivals, self.day) if self.day else arrivals

    def autoscaler(self) -> AutoscaleConfig:
        """Raises ConfigError."""
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


def read_rates(path: str) -> WorkerRates:
    """Reads a JSON file of rates; the guess if there is none. Raises OSError, MsgspecError."""
    if not path:
        return DEFAULT_RATES
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
        raise UsageError(f"--loads: {text!r} is no percentage above 0")
    return share


def _read_fault(text: str) -> Fault:
    parts = text.split(":")
    try:
        at_s, worker_id, state = float(parts[0]), parts[1], parts[2]
    except (ValueError, IndexError):
        raise UsageError(f"--fault: {text!r} is not SECONDS:WORKER:down or up") from None
    if state == "down":
        return Fault(at_s, worker_id, "down")
    if state == "up":
        return Fault(at_s, worker_id, "up")
    raise UsageError(f"--fault: {text!r} ends neither with down nor with up")
