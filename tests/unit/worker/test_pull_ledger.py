from tandem.transfer.reads.messages import Pull, PullResult
from tandem.worker.engine_process.pull_ledger import PullLedger


def pull(pull_id: str, *block_ids: int) -> Pull:
    return Pull(pull_id, "peer", list(block_ids), list(block_ids), 1.0)


def test_blocks_of_a_pull_that_is_done_are_safe() -> None:
    ledger = PullLedger()
    ledger.start("a", pull("p", 1, 2))
    assert ledger.settled(PullResult("p", done=True)) == []
    assert ledger.give_up("a") == ([], [])


def test_a_pull_under_way_is_cancelled_and_its_blocks_are_unsafe_until_it_is_done() -> None:
    ledger = PullLedger()
    ledger.start("a", pull("p", 1, 2))
    ledger.start("b", pull("q", 3))
    assert ledger.give_up("a") == (["p"], [1, 2])
    assert ledger.settled(PullResult("p", done=True)) == [1, 2]
    assert ledger.give_up("b") == (["q"], [3])


def test_blocks_of_a_failed_pull_stay_unsafe_until_they_are_unfenced() -> None:
    ledger = PullLedger()
    ledger.start("a", pull("p", 1, 2))
    assert ledger.settled(PullResult("p", done=False)) == []
    assert ledger.give_up("a") == ([], [1, 2])
    assert ledger.unfenced([2]) == [2]
    assert ledger.unfenced([1]) == [1]


def test_blocks_unfenced_before_their_sequence_is_gone_need_no_quarantine() -> None:
    ledger = PullLedger()
    ledger.start("a", pull("p", 1, 2))
    ledger.settled(PullResult("p", done=False))
    assert ledger.unfenced([1, 2]) == []
    assert ledger.give_up("a") == ([], [])


def test_giving_up_twice_names_a_block_once() -> None:
    ledger = PullLedger()
    ledger.start("a", pull("p", 1))
    assert ledger.give_up("a") == (["p"], [1])
    assert ledger.give_up("a")[1] == []
