"""`python -m tandem.doctor`, which is `tandem doctor`."""

from tandem.doctor.command import main

if __name__ == "__main__":
    main()
