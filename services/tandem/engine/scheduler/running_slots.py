"""Limits the sequences that decode at once, so that each gets its next token in time. Pure.

A sequence has a *running slot* from when it has blocks and decodes here, or awaits its KV to do
so, until it ends. There are as many as the decode of a step has time for, in `RUNNING_SLOTS_SHARE`
of the limit, by what was measured; chunks of prompts lengthen it by half at most
(`perf_model/step_time.py`), and the rest is for what no mean foretells: of a hundred steps 99 are
to be within the limit. Who finds no running slot waits.
"""

from tandem.perf_model.rates import DecodeRate

RUNNING_SLOTS_SHARE = 0.5
STEP_SHARE = 0.75  # of the limit, that a step with chunks of prompts is planned to take
_ROUNDING = 1e-9


def num_running_slots(rate: DecodeRate | None, *, max_num_seqs: int, itl_limit_s: float) -> int:
    """Number of running slots, at least one; all of them until decode was measured.

    `itl_limit_s`: 0 limits nothing.
    """
    if not itl_limit_s or rate is None:
        return max_num_seqs
    left_s = RUNNING_SLOTS_SHARE * itl_limit_s - rate.step_s
    if left_s >= max_num_seqs * rate.sequence_s:
        return max_num_seqs
    if rate.sequence_s <= 0:  # a fitted rate may be 0
        return 1
    return max(1, int(left_s / rate.sequence_s + _ROUNDING))
