"""Limits how many sequences decode at the same time, so that each gets its next token within the
limit on the inter-token latency (ITL).

A sequence occupies a *running slot* from its admission until it ends, if it will decode on this
engine. This includes sequences that still await their KV from a peer. A sequence without a running
slot waits.

An example with an ITL limit of 100 ms: the number of slots is chosen so that a decode step is
predicted to take 65 ms (`RUNNING_SLOTS_SHARE`). Chunks of prompts may lengthen a step to 75 ms
(`STEP_SHARE`, perf_model/step_time.py). The remaining 25 ms are a reserve for steps that take
longer than predicted: the mean ITL of 99 of 100 answers should be within the limit.
"""

from tandem.common.perf_model.rates import DecodeRate

RUNNING_SLOTS_SHARE = 0.65
# A step with prompt chunks is planned to take at most this fraction of the ITL limit.
STEP_SHARE = 0.75
_ROUNDING = 1e-9


def num_running_slots(rate: DecodeRate | None, *, max_num_seqs: int, itl_limit_s: float) -> int:
    """Returns the number of running slots, at least 1.

    It is `max_num_seqs` if `itl_limit_s` is 0 (no limit), or if no rate is measured yet.
    """
    if not itl_limit_s or rate is None:
        return max_num_seqs
    left_s = RUNNING_SLOTS_SHARE * itl_limit_s - rate.step_s
    if left_s >= max_num_seqs * rate.sequence_s:
        return max_num_seqs
    if rate.sequence_s <= 0:  # a rate that was fitted to measurements may be 0
        return 1
    return max(1, int(left_s / rate.sequence_s + _ROUNDING))
