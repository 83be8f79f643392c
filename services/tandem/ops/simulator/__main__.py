"""Runs `tandem simulate TRACE` as `python -m tandem.ops.simulator TRACE`."""

from tandem.ops.simulator.command import main

if __name__ == "__main__":
    main()
