"""`python -m tandem.ops.doctor`, which is `tandem doctor`."""

from tandem.ops.doctor.command import main

if __name__ == "__main__":
    main()
