"""The lines that `tandem up` shows while the cluster runs."""

from __future__ import annotations

import msgspec

from tandem.cluster.launch.activity import Activity, traffic_line
from tandem.common.worker_load import WorkerLoad
from tandem.net.store.cluster_event import ClusterEvent
from tandem.net.store.traffic import Traffic
from tests.unit.cluster.launch.test_screen import decode_worker

NOW = 1000.0


def lines(*events: tuple[str, str, str]) -> list[str]:
    activity = Activity("redis://h", "c", print)
    return [activity.event_line(ClusterEvent(NOW, *event), NOW) for event in events]


def test_a_killed_worker_is_named_once_and_again_when_it_is_back() -> None:
    told = lines(
        ("not connected", "decode-0", "this router cannot reach it"),
        ("ended", "decode-0", "was ended by SIGKILL"),
        ("migrated", "decode-0", "2 requests moved to another worker"),
        ("lost", "decode-0", "it stopped reporting"),
        ("started", "decode-0", "decode worker at h:1, process 2 on h"),
        ("started", "decode-1", "decode worker at h:3, process 4 on h"),
    )
    assert told == [
        "",
        "[yellow]decode-0: its process was ended by SIGKILL; a new one is started",
        "decode-0: 2 requests moved to another worker",
        "",
        "decode-0 is back: decode worker at h:1, process 2 on h",
        "decode-1 joined: decode worker at h:3, process 4 on h",
    ]


def test_refusals_and_markup_are_shown_as_they_are() -> None:
    assert lines(("refused", "queue_full", "3 requests ended with an error")) == [
        "[yellow]3 requests ended with an error: queue_full"
    ]
    assert lines(("problem", "x", "[bold]")) == ["[yellow]x (problem): \\[bold]"]


def test_a_line_of_traffic_has_rates_and_is_empty_without_traffic() -> None:
    before = {"router-0": Traffic(5, 100, 0, 50), "router-1": Traffic(9, 900, 9, 900)}
    now = {"router-0": Traffic(7, 1100, 500, 250, 1), "router-1": Traffic(1, 10, 0, 10)}
    idle = decode_worker("torch")
    load = WorkerLoad(num_running=5, num_prefilling=2, num_waiting=1, num_pulls=4)
    busy = msgspec.structs.replace(idle, load=load)
    records = [busy, msgspec.structs.replace(busy, role="prefill")]
    assert traffic_line(before, now, 10.0, records) == (
        "[dim]requests: 3 finished, 6 decoding, 8 in prefill or queued; tokens/s: 101 in, "
        "21 out; KV 0% used; 50% of the prompts cached[/]"
    )
    assert traffic_line(before, before, 10.0, [idle]) == ""
    assert "1 in prefill or queued" in traffic_line({}, {"r": Traffic(num_in_router=1)}, 10.0, [])
