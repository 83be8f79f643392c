"""`ray start` without Ray's client server.

    python -m tandem.cluster.ray.start_command start --head ...

The client server listens on port 10001 of the node's address and runs code for every caller with
Ray's token. No option of `ray start` turns it off (a port of 0 is refused). Ray leaves it out only
if gRPC for Python is missing, so this program makes `ray start` believe that it is missing.
"""

from ray.scripts import scripts


def main() -> None:
    scripts.get_ray_client_dependency_error = lambda: ImportError("the client server is not wanted")
    scripts.main()


if __name__ == "__main__":
    main()
