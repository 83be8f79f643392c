"""Makes sequences of specs: with the root of their block hashes, their grammar and logit edits."""

from functools import partial

from tandem.adapter import digest_of
from tandem.block_hash import chain_root
from tandem.engine.logit_edits import logit_edits
from tandem.engine.runner_protocol import Runner
from tandem.engine.sequence import Sequence
from tandem.engine.types import SequenceSpec
from tandem.grammars.masks import GrammarMasks


class NewSequences:
    """Knows what the KV of all sequences of an engine depends on."""

    def __init__(
        self, runner: Runner, model_fingerprint: str, block_size: int, grammars: GrammarMasks
    ) -> None:
        self._root = partial(
            chain_root,
            model_fingerprint=model_fingerprint,
            compute_dtype=runner.dtype_name,
            numerics=runner.numerics_name,
            kv_dtype=runner.kv_dtype_name,
            block_size=block_size,
        )
        self._block_size = block_size
        self._vocab_size = runner.vocab_size
        self._grammars = grammars

    @property
    def identity(self) -> str:
        """Names what the KV of all sequences depends on."""
        return self._root().hex()

    def make(self, spec: SequenceSpec, arrival: int) -> Sequence:
        """Returns the sequence of a spec that was checked."""
        root = self._root(cache_salt=spec.cache_salt, adapter=digest_of(spec.adapter))
        sequence = Sequence.from_spec(
            spec, arrival=arrival, block_size=self._block_size, chain_root=root
        )
        grammar = self._grammars.matcher(spec.grammar, spec.token_ids[spec.num_prompt_tokens :])
        sequence.edits = logit_edits(spec, self._vocab_size, grammar)
        return sequence
