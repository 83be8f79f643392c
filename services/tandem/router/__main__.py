"""The program `tandem router`, which runs one router replica.

Secrets come from the environment (`common/config/router.py`).
"""

import sys

from tandem.common.process.early_end import end_on_sigterm, quietly
from tandem.common.process.garbage import without_collection


def main() -> int:
    """Runs the router and returns the exit status.

    The status is 2 for wrong settings, and 1 if a port is in use or the model cannot be loaded. The
    reason is written to stderr in one line.
    """
    # Tokenizer processes import this module again, so heavy imports are inside this function.
    from tandem.common.config.cluster import ClusterConfig
    from tandem.common.config.router import RouterConfig, RouterOptions
    from tandem.common.options import extended, read
    from tandem.errors import TandemError
    from tandem.net.observability.logs import configure_logging

    options = read(RouterOptions, "tandem router")
    try:
        configure_logging(options.router_id)
        config = extended(options, RouterConfig, cluster=ClusterConfig.from_environment())
        with without_collection():
            from tandem.api.server import serve

        failure = serve(config)
    except TandemError as error:
        print(f"{options.router_id}: {error.message}", file=sys.stderr)
        return 2
    if failure is None:
        return 0
    print(f"{options.router_id}: {failure.message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    end_on_sigterm()
    quietly(main)
