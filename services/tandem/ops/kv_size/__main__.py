"""`python -m tandem.ops.kv_size MODEL`, which is `tandem kv-size MODEL`."""

from tandem.ops.kv_size.command import main

if __name__ == "__main__":
    main()
