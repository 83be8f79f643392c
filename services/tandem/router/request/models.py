"""The models of a router: chooses the model of a request by the request's `model`.

A name is, in this order, a model's name, one of its LoRA adapters, or one of its aliases. An API
key may be limited to some models. A model that a key may not use is answered as an unknown one.
"""

from collections.abc import Iterator

from tandem.common.printable import shorten
from tandem.errors import ConfigError, ModelNotFound, NoWorkers
from tandem.net.security.limits import NO_LIMITS, Limits
from tandem.router.request.generator import Generator
from tandem.router.request.log import RequestLog
from tandem.router.request.request import is_alias


class Models:
    """The generators of a router's models. The first model is that of requests without a name."""

    def __init__(self, first: Generator, *others: Generator) -> None:
        self.first = first
        self._all = (first, *others)

    def __iter__(self) -> Iterator[Generator]:
        return iter(self._all)

    def of(self, name: str, limits: Limits = NO_LIMITS) -> Generator:
        """Returns the generator for requests with this `model`, sent with a key of these limits.

        With one model and a key for all models, the name is not checked here: the generator checks
        it. Otherwise raises ModelNotFound, and NoWorkers if the name may be that of a model that is
        not loaded yet.
        """
        if len(self._all) == 1 and not limits.models:
            return self.first
        for find in (self._named, self._adapted):
            if (found := next(find(name, limits), None)) is not None:
                return found
        if any(generator.model is None for generator in self._all):
            raise NoWorkers("the model is not loaded yet", retry_after_s=1.0)
        if (found := next(self._aliased(name, limits), None)) is not None:
            return found
        names = [each for generator in self._all for each in self.names(generator, limits)]
        served = f"the served models are {', '.join(map(repr, names))}"
        if len(names) < 2:
            served = f"the served model is {names[0]!r}" if names else "no model is served"
        raise ModelNotFound(
            f"the model {shorten(name)} is not served here; {served}", param="model"
        )

    def names(self, generator: Generator, limits: Limits) -> list[str]:
        """Returns the names under which a key with these limits may use a model: its own name and
        those of its LoRA adapters."""
        names = [generator.served_name, *(adapter.name for adapter in generator.adapters)]
        if not limits.models or generator.served_name in limits.models:
            return names
        return [name for name in names if name in limits.models]

    def _named(self, name: str, limits: Limits) -> Iterator[Generator]:
        for generator in self._all:
            is_allowed = generator.served_name in self.names(generator, limits)
            if is_allowed and name in ("", generator.served_name):
                yield generator

    def _adapted(self, name: str, limits: Limits) -> Iterator[Generator]:
        is_model = any(name == generator.served_name for generator in self._all)
        for generator in () if is_model else self._all:
            if name in self.names(generator, limits):
                yield generator

    def _aliased(self, name: str, limits: Limits) -> Iterator[Generator]:
        for generator in self._all:
            is_allowed = generator.served_name in self.names(generator, limits)
            if is_allowed and is_alias(name, generator.config.model_aliases):
                yield generator

    def log_of(self, name: str, tenant: str | None = None) -> RequestLog:
        """Returns the log that has a request of this name and tenant. If there is none, returns the
        log with a request of this name of another tenant, or that of the first model."""
        logs = [generator.requests for generator in self._all]
        found = [each for each in logs if each.has(name, tenant)]
        found += [each for each in logs if each.has(name)]
        return found[0] if found else self.first.requests

    def check_names(self) -> None:
        """Raises ConfigError if two of the models, which are loaded, have the same name."""
        names = [generator.served_name for generator in self._all]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(
                f"two models have the name {twice[0]!r}, so requests could not name one of them; "
                "set --served-model-name, or served-model-name in the entry of a further model"
            )

    def set_end_reason(self, reason: str) -> None:
        """Makes all models refuse new requests for this reason."""
        for generator in self._all:
            generator.end_reason = reason

    @property
    def num_running(self) -> int:
        """Number of requests that this router has accepted and not yet answered completely."""
        return sum(generator.num_running for generator in self._all)

    def not_ready_reason(self) -> str:
        """Returns why no request can be served; "" if those for at least one model can be.

        A router is not ready before it has loaded all models.
        """
        for generator in self._all:
            if generator.model is None:
                return generator.not_ready_reason()
        reasons = [generator.not_ready_reason() for generator in self._all]
        return "" if "" in reasons else reasons[0]
