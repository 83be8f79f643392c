"""Runs `ray start` without Ray's client server.

  python -m tandem.cluster.ray.start_command start --head ...

The client server listens on port 10001 of the node's address and runs code for every caller with
Ray's token. `ray start` has no option to disable the server (port 0 is refused) and omits it only
if gRPC for Python is missing. So this program makes gRPC appear to be missing.
"""

from ray.scripts import scripts


def main() -> None:
    scripts.get_ray_client_dependency_error = lambda: ImportError("the client server is not wanted")
    scripts.main()


if __name__ == "__main__":
    main()
