"""`python -m tandem.simulator TRACE`, which is `tandem simulate TRACE`."""

from __future__ import annotations

from tandem.simulator.command import main

if __name__ == "__main__":
    main()
