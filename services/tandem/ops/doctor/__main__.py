"""Runs `tandem doctor` as `python -m tandem.ops.doctor`."""

from tandem.ops.doctor.command import main

if __name__ == "__main__":
    main()
