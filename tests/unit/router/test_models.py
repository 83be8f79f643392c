"""Which model and which log a router with several models uses for a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tandem.errors import ModelNotFound, NoWorkers
from tandem.net.security.limits import Limits
from tandem.router.metrics.timeline import Timeline
from tandem.router.request.generator import Generator
from tandem.router.request.log import RequestLog, RequestRecord
from tandem.router.request.models import Models


def generator(name: str, *, is_loaded: bool = True, aliases: tuple[str, ...] = ()) -> Generator:
    """A generator's names and log."""
    fields: dict[str, Any] = {
        "served_name": name,
        "adapters": [],
        "model": object() if is_loaded else None,
        "config": SimpleNamespace(model_aliases=aliases),
        "requests": RequestLog(),
    }
    return cast(Generator, SimpleNamespace(**fields))


def test_a_name_that_may_be_of_a_model_that_still_loads_is_refused_for_now() -> None:
    first, later = generator("first", aliases=("any-*",)), generator("later", is_loaded=False)
    models = Models(first, later)
    assert models.of("first") is first
    assert models.of("") is first
    for name in ("any-one", "adapter-of-later"):
        with pytest.raises(NoWorkers, match="not loaded yet"):
            models.of(name)
    loaded = Models(first, generator("later"))
    assert loaded.of("any-one") is first
    with pytest.raises(ModelNotFound):
        loaded.of("adapter-of-later")


def test_a_key_that_may_not_use_the_first_model_gets_its_own_for_an_empty_name() -> None:
    first, second = generator("first"), generator("second")
    models = Models(first, second)
    limits = Limits(models=["second"])
    assert models.of("", limits) is second
    with pytest.raises(ModelNotFound, match="the served model is 'second'"):
        models.of("first", limits)


def test_a_tenant_finds_its_own_request_beside_one_of_another_tenant_with_the_same_name() -> None:
    """Clients choose names of requests, so two tenants may use the same one for two models."""
    first, second = generator("first"), generator("second")
    for each, tenant in ((first, "a"), (second, "b")):
        record = RequestRecord(f"id-{tenant}", "chat", Timeline(), tenant, client_id="mine")
        each.requests.open(record)
    models = Models(first, second)
    assert models.log_of("mine", "a") is first.requests
    assert models.log_of("mine", "b") is second.requests
    # "not yours" is said as with one model
    assert models.log_of("id-b", "a") is second.requests
    assert models.log_of("unknown", "a") is first.requests
