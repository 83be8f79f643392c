"""`python -m tandem.ops.simulator TRACE`, which is `tandem simulate TRACE`."""

from tandem.ops.simulator.command import main

if __name__ == "__main__":
    main()
