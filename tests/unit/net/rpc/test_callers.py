from tandem.net.rpc.auth import CALLERS
from tandem.net.rpc.tandem.v1 import worker_pb2


def test_every_call_of_a_worker_has_its_callers() -> None:
    """A call without one would be refused wherever certificates are in use."""
    service = worker_pb2.DESCRIPTOR.services_by_name["Worker"]
    assert {method.name for method in service.methods} == set(CALLERS)
