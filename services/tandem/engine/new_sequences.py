"""Checks specs and creates sequences from them, with their block hashes, grammars and logit
edits."""

from functools import partial
from itertools import count

from tandem.common.adapter import digest_of
from tandem.common.block_hash import chain_root
from tandem.engine.adapter_slots import AdapterSlots
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.logit_edits import logit_edits
from tandem.engine.runner_protocol import Runner
from tandem.engine.scheduler.check_spec import check_spec
from tandem.engine.sequence import Sequence
from tandem.engine.types import SequenceSpec
from tandem.models.grammars.masks import GrammarMasks


class NewSequences:
    """Creates the sequences of one engine, and hashes the properties that the KV of all of them
    depends on, such as the model and the data types."""

    def __init__(
        self,
        runner: Runner,
        model_fingerprint: str,
        layout: KvLayout,
        grammars: GrammarMasks,
        adapters: AdapterSlots,
    ) -> None:
        self._root = partial(
            chain_root,
            model_fingerprint=model_fingerprint,
            compute_dtype=runner.dtype_name,
            numerics=runner.numerics_name,
            kv_dtype=runner.kv_dtype_name,
            block_size=layout.block_size,
        )
        self._block_size = layout.block_size
        self._vocab_size = runner.vocab_size
        self._grammars = grammars
        self._arrivals = count(1)
        self.check = partial(
            check_spec,
            layout=layout,
            max_model_len=runner.max_model_len,
            vocab_size=runner.vocab_size,
            check_adapter=adapters.check,
            why_no_budgets=runner.why_no_budgets,
        )

    @property
    def identity(self) -> str:
        """Hash of the properties that the KV of all sequences depends on, in hexadecimal digits."""
        return self._root().hex()

    def make(self, spec: SequenceSpec, arrival: int | None = None) -> Sequence:
        """Returns the sequence of a spec that passed `check`. Without `arrival`, the sequence is
        the youngest one."""
        arrival = next(self._arrivals) if arrival is None else arrival
        salt = spec.cache_salt
        # Blocks under a KV budget are never shared, so their hashes must be unique.
        if spec.kv_budget is not None:
            salt += f"#{arrival}".encode()
        root = self._root(cache_salt=salt, adapter=digest_of(spec.adapter))
        sequence = Sequence.from_spec(
            spec, arrival=arrival, block_size=self._block_size, chain_root=root
        )
        grammar = self._grammars.matcher(spec.grammar, spec.token_ids[spec.num_prompt_tokens :])
        sequence.edits = logit_edits(spec, self._vocab_size, grammar)
        return sequence
