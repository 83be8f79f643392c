"""Checks that hold after a chaos run, and the summary that it prints."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from tandem.cluster.processes.guardian import cluster_processes
from tandem.router.request.migration_budget import MIGRATION_REASONS
from tests.chaos.faults import Happened, is_rank, other_ranks
from tests.chaos.load import Outcome
from tests.harness.client import metric, migrations
from tests.harness.cluster import LocalCluster, wait_for
from tests.harness.kept_cluster import KeptCluster

AnyCluster = LocalCluster | KeptCluster

_STARTS_OF_RECORDS = re.compile(r"^(?=\d{4}-\d\d-\d\d )", re.M)
# Parts of the errors that are logged if an engine or a rank was made to hang or was killed.
_EXPECTED = (
    *("UCX", "the engine made no progress"),
    *("of the engine ended with status -9", "of the engine does not answer"),
)
_HELD = ("num_running", "num_waiting", "num_leases", "num_pulls", "blocks_used")


def share_resumed(outcomes: Iterable[Outcome]) -> float:
    """The share of the finished requests that reused cached tokens of their prompt."""
    finished = [o for o in outcomes if o.kind == "finished"]
    return sum(o.cached_tokens > 0 for o in finished) / max(1, len(finished))


def wrong_outcomes(outcomes: Iterable[Outcome]) -> list[str]:
    """Describes each request that ended wrongly, one per line.

    A request whose worker is lost migrates, and no request loses three workers, so none may fail.
    """
    return [
        f"request {o.request.number} ({o.request.api}, {len(o.request.prompt.token_ids)} tokens, "
        f"{o.seconds:.1f} s) {o.kind}: {problem}"
        for o in outcomes
        if (problem := _problem(o))
    ]


def _problem(outcome: Outcome) -> str:
    request = outcome.request
    expected = request.prompt.expected[: request.max_tokens]
    if outcome.token_ids != expected[: len(outcome.token_ids)]:
        return f"WRONG TOKENS {outcome.token_ids} instead of {expected}"
    if outcome.kind == "left" or (outcome.kind == "router lost" and not outcome.is_retry):
        return ""
    if outcome.kind != "finished":
        return "it neither finished nor was it left by its client"
    return "" if outcome.token_ids == expected else f"{len(outcome.token_ids)} tokens are too few"


def held(cluster: AnyCluster) -> dict[str, dict[str, int]]:
    """The load that each worker still holds; empty if none does. Raises AssertionError if a pool
    fails its integrity check."""
    found = {}
    for worker in cluster.workers.values():
        try:
            state = worker.state() if cluster.is_ready(worker) else None
        except grpc.RpcError:
            state = None
        if state is None:  # the worker ended and is being restarted
            found[worker.worker_id] = {"away": 1}
            continue
        assert state.integrity_ok, f"{worker.worker_id}: {state.integrity_message}"
        values = {name: getattr(state.load, name) for name in (*_HELD, "blocks_quarantined")}
        if any(values.values()):
            found[worker.worker_id] = values
    return found


def wait_nothing_held(cluster: AnyCluster, deadline_s: float) -> None:
    try:
        wait_for(lambda: not held(cluster), deadline_s=deadline_s, what="the end of all holds")
    except TimeoutError as error:
        raise AssertionError(f"still held after {deadline_s:g} s: {held(cluster)}") from error


def check_ranks(cluster: LocalCluster, tensor_parallel: int) -> None:
    """Checks that each worker has all its ranks, and that no rank of an ended worker is left."""

    def is_complete() -> bool:
        ranks = [other_ranks(worker) for worker in cluster.workers.values()]
        return {len(each) for each in ranks} == {tensor_parallel - 1} and sum(
            map(len, ranks)
        ) == sum(map(is_rank, cluster_processes(cluster.cluster_id)))

    wait_for(is_complete, deadline_s=5, what="ranks that all belong to a running worker")


def wait_all_ended(cluster: LocalCluster) -> None:
    """Waits, after `close`, until no process of the cluster is left. Engines and ranks end a moment
    after their worker."""
    wait_for(
        lambda: not cluster_processes(cluster.cluster_id),
        deadline_s=5,
        what="the end of all processes",
    )


def total(cluster: AnyCluster, name: str, role: str = "", **labels: str) -> float:
    """Sums a counter over workers of this role. A restarted worker started again at 0."""
    return sum(
        metric(cluster, w.worker_id, name, **labels)
        for w in cluster.workers.values()
        if role in ("", w.role)
    )


def errors_logged(cluster: AnyCluster) -> list[str]:
    """Errors in the logs of Tandem's processes, with tracebacks, except those of engines that were
    made to hang and of ranks that were killed."""
    return [
        f"{log.name}: {record}"
        for log in sorted(cluster.logs)
        for record in _STARTS_OF_RECORDS.split(log.read_text(errors="replace"))
        if (" ERROR " in record.partition("\n")[0] or "\nTraceback" in f"\n{record}")
        and not any(text in record for text in _EXPECTED)
    ]


def router_outcomes(cluster: AnyCluster) -> Counter[str]:
    """Counts requests by the outcome that the router or its gRPC replica recorded."""
    found: Counter[str] = Counter()
    for url in cluster.admin_urls:
        text = httpx.get(f"{url}/metrics", timeout=10).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "tandem_requests_total":
                    found[sample.labels["outcome"]] += int(sample.value)
    return found


def check_counted(cluster: AnyCluster, num_before: int, outcomes: Sequence[Outcome]) -> None:
    """Checks that the router counted one outcome for each request that it received.

    If all cores are busy, a client may leave before the router has read its request. The router has
    no record and no outcome for it.
    """
    counted = router_outcomes(cluster)
    num_heard = sum(o.was_heard for o in outcomes)
    assert counted.total() - num_before == num_heard, f"{counted} of {num_heard} that were heard"


def summary(
    cluster: AnyCluster,
    outcomes: Sequence[Outcome],
    happened: Iterable[Happened],
    seconds: float,
    ends: Sequence[tuple[str, int]] | None = None,
) -> str:
    """Formats a summary. `ends` has the workers that ended by themselves and how, if known."""
    kinds = Counter(o.kind if o.was_heard else "left unheard" for o in outcomes)
    slowest = max((o.seconds for o in outcomes), default=0.0)
    broken = errors_logged(cluster)
    pulled = {
        transport: int(total(cluster, "tandem_kv_blocks_pulled_total", transport=transport))
        for transport in ("nixl", "grpc")
    }
    lines = [
        f"{len(outcomes)} requests in {seconds:.0f} s, the slowest {slowest:.1f} s: {dict(kinds)}",
        f"tokens {sum(len(o.token_ids) for o in outcomes)}, all as expected unless said below; "
        f"{share_resumed(outcomes):.0%} of the finished requests resumed after cached tokens",
        f"leases whole {total(cluster, 'tandem_transfer_exposed_seconds_count'):g}, lost "
        f"{total(cluster, 'tandem_remote_prefill_failures_total'):g}; prefills where it decodes "
        f"after that {total(cluster, 'tandem_local_prefills_total'):g}; blocks pulled {pulled}",
        f"NIXL pulls failed {total(cluster, 'tandem_pull_failures_total'):g}, blocks fenced "
        f"{total(cluster, 'tandem_blocks_fenced_total'):g}, consumers made anew "
        f"{total(cluster, 'tandem_consumer_renewals_total'):g}, block mismatches "
        f"{total(cluster, 'tandem_block_mismatches_total'):g}",
        f"router: {dict(router_outcomes(cluster))}; moves "
        f"{ ({reason: migrations(cluster, reason) for reason in MIGRATION_REASONS}) }",
        f"errors logged: {len(broken)}",
        *([] if ends is None else [f"ended by themselves, and their status: {ends or 'none'}"]),
        *sorted(map(str, happened)),
    ]
    return "\n".join(lines)
