"""Blocks and streams that travelled, for the operators' picture."""

from __future__ import annotations

from tandem.router.metrics.flows import Flow, Flows


def test_pulls_between_two_looks_are_summed_by_pair() -> None:
    flows = Flows()
    flows.note_pull("prefill-0", "decode-0", 3)
    flows.note_pull("prefill-0", "decode-0", 4)
    flows.note_pull("prefill-1", "decode-0", 1)
    flows.note_pull("", "decode-0", 5)  # it was prefilled there
    flows.note_pull("prefill-1", "decode-1", 0)
    assert flows.take() == [
        Flow("pull", "prefill-0", "decode-0", 7),
        Flow("pull", "prefill-1", "decode-0", 1),
    ]
    assert flows.take() == []


def test_a_move_waits_for_its_target_and_not_for_ever() -> None:
    flows = Flows()
    worker = ["decode-0"]
    flows.note_move("decode-0", lambda: worker[0])
    flows.note_move("decode-0", lambda: worker[0])
    assert flows.take() == []
    worker[0] = "decode-1"
    assert flows.take() == [Flow("move", "decode-0", "decode-1", 2)]
    flows.note_move("decode-1", lambda: "")
    for _ in range(31):
        assert flows.take() == []
    assert not flows._moves


def test_what_nobody_takes_is_bounded() -> None:
    flows = Flows()
    for n in range(1000):
        flows.note_pull(f"prefill-{n}", "decode-0", 1)
        flows.note_move(f"decode-{n}", lambda: "decode-x")
    assert len(flows.take()) == 512
