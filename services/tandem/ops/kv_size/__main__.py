"""Runs `tandem kv-size MODEL` as `python -m tandem.ops.kv_size MODEL`."""

from tandem.ops.kv_size.command import main

if __name__ == "__main__":
    main()
