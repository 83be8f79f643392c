"""Checks `SequenceSpec`s and creates the engine's sequences from them."""

from functools import partial
from itertools import count

from tandem.common.adapter import digest_of
from tandem.common.block_hash import chain_root
from tandem.engine.adapter_slots import AdapterSlots
from tandem.engine.cache.checkpoints import Checkpoints
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.image_rows import ImageRows
from tandem.engine.logit_edits import logit_edits
from tandem.engine.runner_protocol import Runner
from tandem.engine.scheduler.check_spec import check_spec
from tandem.engine.sequence import Sequence
from tandem.engine.speculation.speculator import Speculator
from tandem.engine.types import SequenceSpec
from tandem.models.grammars.masks import GrammarMasks


class NewSequences:
    """Creates the sequences of one engine, with their block hashes, grammars and logit edits.

    Every block hash includes the engine properties on which KV depends: model, data types, numerics
    and block size. So two engines share blocks only if these properties are equal.
    """

    def __init__(
        self,
        runner: Runner,
        model_fingerprint: str,
        layout: KvLayout,
        grammars: GrammarMasks,
        adapters: AdapterSlots,
        images: ImageRows,
        speculator: Speculator,
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
        self._checkpoints = Checkpoints.of(layout)
        self._vocab_size = runner.vocab_size
        self._grammars = grammars
        self._speculator = speculator
        self._arrivals = count(1)
        self.check = partial(
            check_spec,
            layout=layout,
            max_model_len=runner.max_model_len,
            vocab_size=runner.vocab_size,
            check_adapter=adapters.check,
            check_images=images.check,
            why_no_budgets=runner.why_no_budgets,
        )

    @property
    def identity(self) -> str:
        """Hash of the engine properties on which KV depends, in hexadecimal digits."""
        return self._root().hex()

    def make(self, spec: SequenceSpec, arrival: int | None = None) -> Sequence:
        """Creates the sequence for a spec that passed `check`. `arrival` is the number of the
        sequence in the order of arrival; None: the next number."""
        arrival = next(self._arrivals) if arrival is None else arrival
        salt = spec.cache_salt
        # The blocks of a sequence with a KV budget are never shared. The arrival number in the salt
        # makes their hashes unique.
        if spec.kv_budget is not None:
            salt += f"#{arrival}".encode()
        root = self._root(cache_salt=salt, adapter=digest_of(spec.adapter))
        sequence = Sequence.from_spec(
            spec,
            arrival=arrival,
            block_size=self._block_size,
            chain_root=root,
            checkpoints=self._checkpoints,
        )
        grammar = self._grammars.matcher(spec.grammar, spec.token_ids[spec.num_prompt_tokens :])
        sequence.edits = logit_edits(spec, self._vocab_size, grammar)
        sequence.drafter = self._speculator.drafter(spec)
        return sequence
