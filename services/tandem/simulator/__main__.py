"""`python -m tandem.simulator TRACE`, which is `tandem simulate TRACE`."""

from tandem.simulator.command import main

if __name__ == "__main__":
    main()
