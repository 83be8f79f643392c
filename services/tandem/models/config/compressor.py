"""The compressors of compressed attention, read from config.json (DeepSeek V4).

A layer with a compressor attends to the last tokens, in a window, and to *entries*. An entry is one
key, which is its value too, for `rate` consecutive tokens, a *run*. Of each token x, the compressor
computes an input c = W_c x and a gate g = W_g x. For each element, the entry of a run is

    entry = rotate(norm(sum over the tokens s of the run of softmax(g[s] + bias[s]) * c[s]))

where `bias` depends on the place in the run, and the entry is rotated to the position of the run's
first token. A query at position t sees the entries of the runs that end at t or before.

With overlap, a token has two inputs and two gates. The entry of a run is a sum over the first ones
of the tokens of the run before, and the second ones of the tokens of the run itself. An indexer
then chooses the entries to which a query attends. The indexer has smaller entries of its own, made
in the same way, which are its keys.

So these are kept for a layer with a compressor:

- the KV of the tokens in the window;
- the entries of all runs so far;
- the inputs and gates of the tokens whose run has not ended, and with overlap of the run before.
  For a token, these are its last 2 or 1 runs, a window as well.
"""

from dataclasses import dataclass

from tandem.models.config.indexer import Indexer


@dataclass(frozen=True, slots=True)
class Compressor:
    """The sizes of a layer's compressor."""

    rate: int  # number of tokens of a run
    dim: int  # number of elements of an entry
    # Chooses the entries to which a query attends, and has as many keys. The runs then overlap.
    # None: a query attends to all entries that it sees, and runs do not overlap.
    indexer: Indexer | None = None

    @property
    def num_seen(self) -> int:
        """Number of tokens, up to the last one of a run, from which the run's entry is computed."""
        return self.rate if self.indexer is None else 2 * self.rate

    @property
    def dims(self) -> tuple[int, ...]:
        """Number of elements of each kind of entry: of attention's, and of the indexer's."""
        return (self.dim,) if self.indexer is None else (self.dim, self.indexer.dim)

    @property
    def num_inputs(self) -> int:
        """Number of elements of a token's inputs and gates."""
        return sum(2 * dim for dim in self.dims) * (1 if self.indexer is None else 2)
