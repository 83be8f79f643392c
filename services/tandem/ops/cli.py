"""`tandem`: the entry point. Ctrl-C ends each command in silence, also while it is loading."""

from tandem.common.process.early_end import quietly


def main() -> None:
    """Runs the command of this process's arguments."""
    quietly(_run)


def _run() -> None:
    # Imported late: Ctrl-C may come meanwhile.
    from tandem.ops.commands import run

    run()


if __name__ == "__main__":
    main()
