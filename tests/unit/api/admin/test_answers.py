"""What the page answers to an operator's questions."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tandem.api.admin.answers import (
    Bottleneck,
    Service,
    Waiting,
    bottleneck_of,
    kv_cache,
    last_minute,
    one_more_decode,
    slow,
    slowest_of,
    verdict,
    waiting_of,
)
from tandem.common.perf_model.rates import DecodeRate, WorkerRates
from tandem.common.worker_load import TierUse, WorkerLoad
from tandem.errors import QueueFull, WorkerLost
from tandem.net.store.cluster_event import ClusterEvent
from tandem.net.store.registry import KvCompatibility, WorkerRecord
from tandem.router.metrics.latencies import Latency
from tandem.router.metrics.timeline import Timeline
from tandem.router.request.log import RequestRecord
from tandem.router.workers.known_worker import KnownWorker
from tandem.router.workers.rows import WorkerRow
from tests.harness.page_server import _UP

NOW = 1_000_000.0
SLOW = Service(Latency(3, 200.0, None, 4000.0, 1), Latency(21, 100.0, 120.0, 130.0))
QUICK = Service(Latency(1, 80.0, None, 80.0), Latency(7, 100.0, None, 100.0))
NOTHING = Service()
NO_BOTTLENECK = Bottleneck("")
MEASURED = WorkerRates(decode=DecodeRate(0.010, 0.005), measured=True)


def worker(
    worker_id: str, *tiers: TierUse, rates: WorkerRates = MEASURED, **load: Any
) -> KnownWorker:
    role = worker_id.partition("-")[0]
    client: Any = _UP if role == "decode" else None
    record = WorkerRecord(
        worker_id=worker_id,
        epoch="e",
        role=role,
        state="ready",
        address="10.0.0.1:5000",
        metrics_address="",
        host="h",
        pid=1,
        model="m",
        max_model_len=100,
        compatibility=KvCompatibility("m", "float32", "invariant", 16, "float32", "l", 1),
        load=WorkerLoad(blocks_total=100, **load),
        rates=rates,
        tiers=tiers,
    )
    return KnownWorker(record, client)


def request(ttft_ms: float | None, ago_s: float = 10.0, **facts: Any) -> dict[str, Any]:
    return {
        "id": str(ago_s),
        "created": NOW - ago_s,
        "outcome": "running" if ttft_ms is None else "stop",
        "ttft_ms": ttft_ms,
        "e2e_ms": None if ttft_ms is None else ttft_ms + 700,
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-0",
        "first_decode_worker": "decode-0",
        "worker_queue_ms": facts.get("stages_ms", {}).get("queue", (ttft_ms or 0.0) / 4),
        "prefill_queue_ms": 0.0,
        "tokens_ahead": 0,
        "transport": "nixl",
        "blocks_pulled": 0,
        "shared_wait_ms": 0.0,
        "usage": {"prompt_tokens": 100, "cached_tokens": 0, "completion_tokens": 8},
        "stages_ms": {} if ttft_ms is None else {"queue": ttft_ms / 4, "prefill": 3 * ttft_ms / 4},
        **facts,
    }


def test_slow_first_tokens_have_a_cause() -> None:
    assert slow([request(4000.0), request(100.0, 20.0), request(200.0, 30.0)], SLOW, NOW) == (
        "First tokens are slow: 200 ms at the median of the last minute's 3 requests, 4.0 s at most"
        " (target: 2 s). 75% of that is prefill (computing prompts, and waiting behind other"
        " prompts). The slowest spent 3.0 s in prefill on prefill-0, which computed 100 prompt"
        " tokens."
        " Then a token follows every 100 ms, at the median."
    )


def test_quick_first_tokens_do_not_stand_out() -> None:
    assert slow([request(80.0)], QUICK, NOW) == (
        "Nothing stands out. First tokens came after 80 ms at the median of the last minute's"
        " 1 request (target: 2 s). 75% of that is prefill (computing prompts, and waiting behind"
        " other prompts). Then a token follows every 100 ms, at the median."
    )


def test_requests_that_wait_are_slow_before_they_have_a_token() -> None:
    waiting = replace(NOTHING, waiting=Waiting(2, 1, 8.0))
    assert slow([request(None, 8.0), request(None, 3.0)], waiting, NOW) == (
        "2 requests are in prefill or queued now; the longest wait for a first token is 8 s."
    )
    told = slow([request(80.0)], replace(QUICK, waiting=Waiting(1, 1, 8.0)), NOW)
    assert "1 request is in prefill or queued now; the longest wait for a first token is 8" in told
    assert "First tokens are slow:" in told
    early = replace(QUICK, waiting=Waiting(1, 0, 1.0))
    assert "in prefill or queued" not in slow([request(80.0)], early, NOW)


def test_open_requests_without_a_token_are_counted_by_their_own_targets() -> None:
    records = [
        RequestRecord("a", "chat", Timeline(), created=NOW - 40),
        RequestRecord("b", "chat", Timeline(), created=NOW - 1),
        RequestRecord("c", "chat", Timeline(), created=NOW - 90),
        ended(50),
    ]
    records[2].timeline.ttft_s = 3.0
    assert waiting_of(records, NOW, 7, ttft_target_s=2, ttft_token_s=0) == Waiting(7, 1, 40.0)
    prompt: Any = SimpleNamespace(request=SimpleNamespace(token_ids=[1] * 1000))
    records[0].jobs = [prompt]
    assert waiting_of(records, NOW, 7, ttft_target_s=2, ttft_token_s=0.1).num_late == 0
    assert waiting_of([], NOW, 0, ttft_target_s=2, ttft_token_s=0) == Waiting()


def test_the_worker_with_most_of_the_time_is_named() -> None:
    waits = {"stages_ms": {"queue": 3000.0, "prefill": 100.0}, "worker_queue_ms": 3000.0}
    told = [request(3100.0, n, prefill_worker=f"prefill-{n // 4}", **waits) for n in range(1, 6)]
    assert " 97% of that is waiting in queues, mostly at prefill-0." in slow(told, SLOW, NOW)
    for each in told:
        each["worker_queue_ms"] = 4.0
    told.append(request(100.0, 9))
    assert "waiting in queues, mostly at the router." in slow(told, SLOW, NOW)


def test_requests_without_a_token_say_where_the_prompts_are() -> None:
    known = [worker("decode-0"), worker("prefill-0", queued_tokens=9200)]
    waiting = replace(NOTHING, waiting=Waiting(1, 1, 8.0))
    told = slow([request(None, 8.0)], waiting, NOW, known=known)
    assert told == (
        "1 request is in prefill or queued now; the longest wait for a first token is 8 s."
        " prefill-0 has the most prompt tokens to compute: 9,200."
    )


def test_old_requests_say_nothing_of_now() -> None:
    told = "Nothing to report: no request got a first token in the last minute."
    assert slow([request(4000.0, 90.0)], NOTHING, NOW) == told
    assert slow([], NOTHING, NOW) == told


def test_the_kv_cache_has_shares_its_size_and_its_fullest_worker() -> None:
    host = TierUse("host", 1000, 250)
    known = [
        worker("prefill-0", host, blocks_used=10, blocks_cached=50),
        worker("decode-0", blocks_used=30, blocks_cached=10),
    ]
    assert kv_cache(known) == (
        "20% is in use by open requests, 30% holds prefixes that later requests can reuse, and"
        " 50% is free (total: 1,600 tokens on 1 prefill worker and 1,600 tokens on 1 decode"
        " worker). The fullest worker is decode-0 with 30% in use. KV tiers in use: host 25%."
    )
    assert kv_cache([]) == "Not known: no worker is ready."


@pytest.mark.parametrize(
    ("used", "cached", "told"),
    [
        (334, 333, ["33%", "33%", "34%"]),
        (335, 335, ["34%", "34%", "32%"]),
        (495, 505, ["50%", "50%", "0%"]),
        (4, 996, ["<1%", ">99%", "0%"]),
        (1000, 0, ["100%", "0%", "0%"]),
        (996, 0, [">99%", "0%", "<1%"]),
    ],
)
def test_the_shares_of_the_kv_cache_add_up(used: int, cached: int, told: list[str]) -> None:
    full = worker("decode-0", blocks_used=used, blocks_cached=cached)
    load = msgspec.structs.replace(full.record.load, blocks_total=1000)
    known = KnownWorker(msgspec.structs.replace(full.record, load=load), full.client)
    assert re.findall(r"[<>]?\d+%", kv_cache([known]))[:3] == told


def ended(ago_s: float, error: QueueFull | None = None) -> RequestRecord:
    record = RequestRecord("r", "chat", Timeline(), outcome="stop", created=NOW - ago_s, e2e_s=1.0)
    if error:
        record.fail(error)
    return record


def test_an_idle_cache_has_no_fullest_worker_and_little_is_not_none() -> None:
    known = [worker("decode-0"), worker("decode-1")]
    assert kv_cache(known).startswith("0% is in use by open requests, 0% holds prefixes")
    assert "fullest" not in kv_cache(known)
    used = [worker(f"decode-{n}", blocks_used=n == 0) for n in range(2)]
    assert kv_cache(used).startswith("<1% is in use")


def test_the_slowest_request_of_the_last_minute_is_found() -> None:
    records = [ended(70), ended(8), ended(9), ended(5)]
    for record, ttft_s in zip(records, (5.0, 1.0, 3.0, None), strict=True):
        record.timeline.ttft_s = ttft_s
    assert slowest_of(records, NOW) is records[2]
    assert slowest_of(records[:1], NOW) is None
    records[1].timeline.ttft_s = 3.0
    records[1].created -= 2
    assert slowest_of(records, NOW) is records[1], "of equal ones, the first"
    assert slowest_of(records[::-1], NOW) is records[1]


def test_the_last_minute_has_requests_and_events() -> None:
    events = [
        ClusterEvent(NOW - 5, "started", "decode-1", "at 10.0.0.1"),
        ClusterEvent(NOW - 8, "started", "decode-0", "at 10.0.0.2"),
        ClusterEvent(NOW - 9, "mode", "router-0", "requests are served"),
        ClusterEvent(NOW - 9, "changed", "", "the size of the decode pool: 1 -> 2, by a"),
        ClusterEvent(NOW - 10, "refused", "", "a drain, by b"),
        ClusterEvent(NOW - 90, "lost", "decode-7", "long ago"),
    ]
    records = [ended(5), ended(6, QueueFull("full")), ended(90)]
    assert last_minute(records, events, NOW, 1).splitlines() == [
        "2 requests arrived, 1 got the first token, and 2 ended; 1 of these failed: 1 queue_full.",
        "5 to 8 s ago: decode-1, decode-0 are ready to serve.",
        "9 s ago: router-0: requests are served.",
        "9 s ago: the size of the decode pool: 1 -> 2, by a.",
        "The list of events has 1 more.",
    ]
    both = [ClusterEvent(NOW - 1, "well", name, "it is ready") for name in ("a", "b")]
    assert last_minute([], both, NOW, 0) == "1 s ago: a, b are well again."
    refused = [ClusterEvent(NOW - n, "refused", "full", "1 request failed") for n in (1, 9)]
    assert last_minute([], refused, NOW, 0) == "1 to 9 s ago: 1 request failed (full, 2 times)."
    opened = RequestRecord("o", "chat", Timeline(), created=NOW - 3)
    early = ended(60.5)
    assert last_minute([ended(5), opened, early], [], NOW, 3) == (
        "2 requests arrived, 3 got the first token, and 2 ended; none failed."
    )
    assert last_minute([opened], [], NOW, 0) == (
        "1 request arrived, 0 got the first token, and 0 ended; none failed."
    )
    assert last_minute([], [], NOW, 0) == (
        "Nothing: no request came or ended, and no worker joined or left."
    )


def test_a_kill_is_told_first_with_what_became_of_its_requests() -> None:
    kill = [ClusterEvent(NOW - 1, "ended", "decode-1", "was ended by SIGKILL")]
    rows = [WorkerRow("decode-1", "decode", "loading")]
    told = last_minute([ended(5)], kill, NOW, 0, {"decode-1": 3}, rows).splitlines()
    assert told == [
        "1 s ago decode-1 was killed (SIGKILL); 3 of its requests moved to other workers, and 0"
        " were lost; it restarts.",
        "1 request arrived, 0 got the first token, and 1 ended; none failed.",
    ]
    moves = ClusterEvent(
        NOW - 1, "migrated", "decode-1", "5 requests moved as this worker was lost"
    )
    gone = [moves, ClusterEvent(NOW - 2, "lost", "decode-1", "it stopped reporting")]
    failed = ended(5, WorkerLost("gone"))
    failed.facts = {"decode_worker": "decode-1"}
    rows = [WorkerRow("decode-1", "decode", "ready")]
    assert last_minute([failed], [*kill, *gone], NOW, 0, {}, rows).splitlines() == [
        "1 s ago decode-1 was killed (SIGKILL); 5 of its requests moved to other workers, and 1 was"
        " lost; it is ready again.",
        "1 request arrived, 0 got the first token, and 1 ended; 1 of these failed: 1 worker_lost.",
    ]
    assert last_minute([], gone[1:], NOW, 0) == "2 s ago decode-1 was lost."
    note = "started 1 s ago; its previous process was ended by SIGKILL"
    rows = [WorkerRow("decode-1", "decode", "loading", note)]
    assert last_minute([], gone[:1], NOW, 0, {}, rows).splitlines() == [
        "1 s ago decode-1 was killed (SIGKILL); 5 of its requests moved to other workers, and 0"
        " were lost; it restarts."
    ], "the move is known before the end of the process"
    assert last_minute([], [], NOW, 0, {"decode-1": 2}, rows) == (
        "1 s ago decode-1 was killed (SIGKILL); 2 of its requests moved to other workers, and 0"
        " were lost; it restarts."
    ), "no event has been read yet"


def test_the_verdict_names_pools_that_lack_workers_and_slow_first_tokens() -> None:
    rows = [WorkerRow(f"decode-{n}", "decode", "ready") for n in range(3)]
    rows += [WorkerRow("prefill-0", "prefill", "draining"), WorkerRow("prefill-9", "x", "stopped")]
    none = NO_BOTTLENECK
    assert verdict(rows, QUICK, none, is_well=True) == ""
    assert verdict(rows, SLOW, none, is_well=True) == (
        "All workers are ready, but first tokens are slow: 1 of 3 in the last minute took longer"
        " than the target of 2 s (median 200 ms, slowest 4.0 s)."
    )
    slow = (
        "First tokens are slow: 1 of 3 in the last minute took longer than the target of 2 s"
        " (median 200 ms, slowest 4.0 s)."
    )
    assert verdict(rows, SLOW, none, is_well=False) == slow, "the problem is not one of a worker"
    assert verdict(rows, QUICK, none, is_well=False) == ""
    rows[1] = WorkerRow("decode-1", "decode", "loading")
    degraded = "Degraded: 2 of 3 decode workers are ready."
    assert verdict(rows, QUICK, none, is_well=False) == degraded
    assert verdict(rows, SLOW, none, is_well=False) == f"{degraded} {slow}", "both are true"


def test_the_verdict_has_the_cause_of_slow_first_tokens_and_the_longest_wait() -> None:
    rows = [WorkerRow("decode-0", "decode", "ready")]
    prefill = Bottleneck("prefill", "evidence")
    assert verdict(rows, QUICK, prefill, is_well=True) == "", "a queue alone is not slow"
    assert verdict(rows, SLOW, prefill, is_well=True).endswith(
        "(median 200 ms, slowest 4.0 s). In the last minute, prompts waited most for prefill"
        " workers: one more prefill worker would help most."
    )
    longer = replace(SLOW, waiting=Waiting(2, 2, 40.0))
    assert verdict(rows, longer, NO_BOTTLENECK, is_well=True).endswith(
        "slowest 4.0 s), and the oldest request without one has waited 40 s."
    )
    shorter = replace(SLOW, waiting=Waiting(2, 2, 3.0))
    assert verdict(rows, shorter, NO_BOTTLENECK, is_well=True).endswith("slowest 4.0 s).")
    stuck = replace(NOTHING, waiting=Waiting(2, 2, 40.0))
    assert verdict(rows, stuck, NO_BOTTLENECK, is_well=True) == (
        "All workers are ready, but first tokens are slow: the oldest request without one has"
        " waited 40 s."
    )


def test_one_more_decode_worker_shortens_steps_of_full_workers() -> None:
    load = {"num_running": 8, "num_prefilling": 2, "num_waiting": 1}
    busy = [worker(f"decode-{n}", **load) for n in range(2)]
    assert one_more_decode(busy, NO_BOTTLENECK, (), 60.0) == (
        "A decode step would be about 25% shorter, with 4.0 decoding requests at each decode worker"
        " instead of 6.0, if the new worker has processor cores or a GPU of its own. The 60 ms"
        " between tokens, the last minute's median, would be 45 ms at best."
        " 2 requests queued at decode workers could start. Room for KV in the decode pool"
        " would grow by 50%, from 3,200 to about 4,800 tokens."
    )
    assert "between tokens" not in one_more_decode(busy, NO_BOTTLENECK)
    told = one_more_decode([worker("decode-0", num_running=1)], NO_BOTTLENECK, (), 60.0)
    assert told.startswith("The time between tokens would hardly change, with 0.5 decoding")


def test_the_bottleneck_is_named_first() -> None:
    known = [worker("decode-0", num_running=1), worker("prefill-0")]
    prefill = bottleneck_of(known, [], {"prefill": 3.5, "decode": 1.25}, NOW)
    told = one_more_decode(known, prefill)
    assert told.startswith(
        "Little for first tokens: the bottleneck is prefill, and one more prefill worker would help"
        " more. "
    )
    assert (
        "A new prompt waits behind others: by the workers' estimates, for 3.5 s at a prefill"
        " worker, or 1.2 s at a decode worker that computes it itself (means of the last minute)."
        in told
    )
    decode = bottleneck_of(known, [], {"prefill": 0.0, "decode": 2.8}, NOW)
    assert one_more_decode(known, decode).startswith(
        "First tokens would come sooner: the bottleneck is decode, and the new worker would take"
        " over 50% of the decode workers' prompts. "
    )
    assert decode.cause == (
        "In the last minute, prompts waited most for decode workers: one more decode worker would"
        " help most."
    )


def test_prompts_that_waited_for_decode_workers_count() -> None:
    known = [worker("decode-0"), worker("prefill-0")]
    waited = request(4000.0, prefill_worker="", stages_ms={"queue": 2800.0, "prefill": 1200.0})
    found = bottleneck_of(known, [waited], {}, NOW)
    assert found == Bottleneck(
        "decode",
        "In the last minute, a prompt that a prefill worker computed waited 0.0 s, on average, and"
        " one that a decode worker computed itself 2.8 s.",
    )
    short = bottleneck_of(known, [request(80.0)], {}, NOW)
    assert (short.role, short.cause) == ("", "")
    assert one_more_decode(known, short).startswith(
        "Little for first tokens: in the last minute, a prompt waited only 20 ms for its worker,"
        " on average. "
    )


def test_a_queue_of_a_moment_does_not_change_the_answer() -> None:
    quiet = [worker("decode-0"), worker("prefill-0")]
    burst = [worker("decode-0"), worker("prefill-0", queued_tokens=9000, queued_s=0.6)]
    told = [bottleneck_of(known, [request(80.0)], {}, NOW) for known in (quiet, burst)]
    assert told[0] == told[1]


def test_the_stages_of_all_requests_of_the_last_minute_count() -> None:
    older = [request(400.0, 40.0, stages_ms={"queue": 400.0})] * 9
    assert "75% of that is prefill" in slow([request(80.0)], QUICK, NOW)
    assert "98% of that is waiting in queues" in slow([request(80.0)], QUICK, NOW, older)


def test_figures_are_for_the_workers_that_come_back() -> None:
    rows = [WorkerRow(f"decode-{n}", "decode", "loading") for n in (1, 2)]
    rows.append(WorkerRow("decode-0", "decode", "ready"))
    back = "decode-1, decode-2 are starting: the figures are for 3 decode workers instead of 1."
    told = one_more_decode([worker("decode-0", num_running=6)], NO_BOTTLENECK, rows, 60.0)
    assert told.startswith(back)
    assert "60 ms" not in told, "it was measured with the workers that come back"
    assert "with 2.0 decoding requests at each decode worker instead of 6.0" in told
    assert told.endswith("would grow by 200%, from 1,600 to about 4,800 tokens.")
    prefill = Bottleneck("prefill", "evidence")
    verdict_first = one_more_decode([worker("decode-0")], prefill, rows[1:])
    assert "help more. decode-2 is starting: the figures are for 2 decode workers" in verdict_first
    assert one_more_decode([], NO_BOTTLENECK, rows[:1]) == (
        "Requests would be served. decode-1 is starting."
    )


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ([], "Requests would be served. No decode worker is ready now."),
        ([worker("prefill-0")], "Requests would be served. No decode worker is ready now."),
        (
            [worker("decode-0", num_running=2, num_prefilling=2)],
            "The time between tokens would not change: no request is decoding now.",
        ),
        (
            [worker("decode-0", rates=WorkerRates(), num_running=3)],
            "The effect on speed is not known yet: no decode worker has measured its steps.",
        ),
    ],
)
def test_one_more_decode_worker_where_little_is_known(known: list[KnownWorker], told: str) -> None:
    assert one_more_decode(known, NO_BOTTLENECK).startswith(told)
