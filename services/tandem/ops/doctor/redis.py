"""A check of the Redis that this process's environment names."""

import time

from tandem.common.config.cluster import REDIS_URL_VARIABLE
from tandem.errors import ConfigError
from tandem.ops.doctor.host import Finding, Host

_DEADLINE_S = 2.0


def redis(host: Host) -> Finding:
    """Asks Redis for an answer. The finding never shows the password."""
    from tandem.net.store.client import wait_until_answers

    url = host.environment.get(REDIS_URL_VARIABLE)
    if not url:
        return Finding("Redis", f"not asked: {REDIS_URL_VARIABLE} is not set")
    asked_at = time.monotonic()
    try:
        wait_until_answers(url, _DEADLINE_S)
    except ConfigError as error:
        cost = "workers and routers do not start; running ones place requests by load alone"
        remedy = f"check the server, the network and {REDIS_URL_VARIABLE}"
        return Finding("Redis", error.message, cost, remedy)
    return Finding("Redis", f"answers in {(time.monotonic() - asked_at) * 1e3:.0f} ms")
