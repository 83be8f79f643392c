"""A sequence draws its next token by its own parameters, and by (seed, position).

The draw for the token at index i of a whole sequence depends on its seed and on i alone, so a
sequence that was moved, preempted or prefilled elsewhere goes on as it would have.
"""

from tandem.engine.sequence import Sequence
from tandem_kernels.sampling import Draw


def next_draw(sequence: Sequence) -> Draw:
    """The draw of the token that follows the sequence."""
    sampling = sequence.spec.sampling
    return Draw(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        position=sequence.num_tokens,
    )
