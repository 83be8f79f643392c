"""Loads and unloads LoRA adapters on the workers, as operators request over HTTP or gRPC.

Change    What the workers do
load      every worker reads the folder; workers that can use the adapter serve it under its name
unload    every worker stops serving the name

Each worker's record lists the names of the adapters that the worker serves. After a change, the
router waits until the records that it reads contain the change.

A worker that could not use the folder may still load the adapter later: when a request on that
worker needs the adapter, the worker tries again. The files in the folder must have the adapter's
digest by then.
"""

import asyncio
import logging
import re
import time
from dataclasses import dataclass

from tandem.common.adapter import Adapter
from tandem.common.config.engine import ADAPTER_NAME
from tandem.errors import BadRequest, ModelNotFound, NotNow, NoWorkers, TandemError
from tandem.net.rpc.convert import to_message
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.security.audit_trail import AuditTrail, Caller
from tandem.net.store.registry import WorkerRecord
from tandem.router.request.models import Models
from tandem.router.scaling.changes import logged_change
from tandem.router.scaling.control import SEEN_DEADLINE_S, ClusterControl

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """The result of loading an adapter.

    `refused` maps the id of each worker that could not use the adapter's folder to the reason.
    """

    adapter: Adapter
    refused: dict[str, str]


class AdapterControl:
    """Loads and unloads adapters. Raises errors of `tandem/errors.py`.

    The log of changes names the caller, `who`.
    """

    def __init__(self, control: ClusterControl, models: Models, trail: AuditTrail) -> None:
        """`models` provides the names of the models, which no adapter may have."""
        self._control = control
        self._models = models
        self._view = control.view
        self._trail = trail

    async def load(self, name: str, path: str, *, in_place: bool, who: Caller) -> AdapterLoaded:
        """Makes the workers serve the adapter in their folder `path` under the name `name`.

        If an adapter of this name is served already, it is replaced only if `in_place` is True.
        """
        with logged_change(self._trail, who, f"adapter {name}") as change:
            served = self._view.adapters()
            change.before = served[name].digest if name in served else "none"
            change.after = path
            _check_names(name, path, models=self._models)
            if name in served and not in_place:
                raise BadRequest(
                    f"the lora adapter {name!r} has already been loaded. If you want to load the "
                    "adapter in place, set 'load_inplace' to true",
                    param="lora_name",
                )
            adapter, records, refused = await self._describe(name, path)
            change.after = f"{adapter.digest} of {path}"
            request = pb.AddAdapterRequest(adapter=to_message(pb.Adapter, adapter))
            calls = [self._control.call(record, "AddAdapter", request) for record in records]
            _raise_all_failed(await asyncio.gather(*calls, return_exceptions=True))
        await self._see(name, adapter)
        return AdapterLoaded(adapter, refused)

    async def unload(self, name: str, *, who: Caller) -> None:
        """Stops serving the adapter.

        Raises ModelNotFound if no adapter has the name. Raises WorkerLost if a worker did not
        answer; the other workers have removed the adapter.
        """
        with logged_change(self._trail, who, f"adapter {name}") as change:
            change.after = "none"
            if (adapter := self._view.adapters().get(name)) is None:
                raise ModelNotFound(
                    f"the lora adapter {name[:80]!r} cannot be found", param="lora_name"
                )
            change.before = adapter.digest
            request = pb.RemoveAdapterRequest(name=name)
            calls = [self._control.call(r, "RemoveAdapter", request) for r in self._records()]
            for answer in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(answer, BaseException):
                    raise answer
        await self._see(name, None)

    async def _describe(
        self, name: str, path: str
    ) -> tuple[Adapter, list[WorkerRecord], dict[str, str]]:
        """Returns the adapter, the workers that can use the adapter, and the refusals.

        The refusals map the id of each worker that cannot use the adapter to the reason.
        """
        records = self._records()
        request = pb.DescribeAdapterRequest(path=path)
        calls = [self._control.call(record, "DescribeAdapter", request) for record in records]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        found: dict[str, tuple[int, list[WorkerRecord]]] = {}
        refused: dict[str, str] = {}
        for record, answer in zip(records, answers, strict=True):
            if isinstance(answer, TandemError):
                refused[record.worker_id] = answer.message
            elif isinstance(answer, BaseException):
                raise answer
            elif answer.error:
                refused[record.worker_id] = answer.error
            else:
                found.setdefault(answer.digest, (answer.rank, []))[1].append(record)
        if len(found) > 1:
            raise NotNow(
                f"the files in {path} are not the same on all workers: "
                + "; ".join(
                    f"{digest} on {', '.join(r.worker_id for r in has)}"
                    for digest, (_, has) in sorted(found.items())
                )
            )
        if not found:
            raise BadRequest(next(iter(refused.values())), param="lora_path")
        ((digest, (rank, usable)),) = found.items()
        if not any(record.role == "decode" for record in usable):
            reasons = [refused[r.worker_id] for r in records if r.role == "decode"]
            raise BadRequest(
                reasons[0] if reasons else "there is no decode worker", param="lora_path"
            )
        return Adapter(name, digest, path, rank, time.time()), usable, refused

    def _records(self) -> list[WorkerRecord]:
        known = [w.record for w in self._view.known()]
        records = [r for r in known if r.has_kv and self._view.is_compatible(r)]
        if not records:
            raise NoWorkers(
                "this router knows no worker that serves the router's model", retry_after_s=1.0
            )
        return records

    async def _see(self, name: str, adapter: Adapter | None) -> None:
        """Waits until the workers' records list `adapter` under `name`.

        If `adapter` is None, waits until no record lists `name`.
        """
        try:
            async with asyncio.timeout(SEEN_DEADLINE_S):
                while self._view.adapters().get(name) != adapter:
                    await self._view.wait_change()
        except TimeoutError:
            log.warning(
                "the workers loaded or removed adapter %s, but their records in Redis do not "
                "show the change after %g s. This router uses the old list of adapters until "
                "the records show the change",
                name,
                SEEN_DEADLINE_S,
            )


def _check_names(name: str, path: str, *, models: Models) -> None:
    if not re.fullmatch(ADAPTER_NAME, name):
        raise BadRequest(
            f"lora_name is {name[:80]!r}; it must have 1 to 128 letters, digits and . _ : / -",
            param="lora_name",
        )
    if any(name == generator.served_name for generator in models):
        raise BadRequest(
            f"lora_name is {name!r}, which is the name of a model; choose another name",
            param="lora_name",
        )
    if not path.startswith("/"):
        raise BadRequest(
            f"lora_path is {path[:80]!r}; it must be an absolute path on the workers",
            param="lora_path",
        )


def _raise_all_failed(answers: list[object]) -> None:
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    if errors and len(errors) == len(answers):
        raise errors[0]
