"""`python -m tandem` runs the command `tandem`."""

from tandem.ops.cli import main

if __name__ == "__main__":
    main()
