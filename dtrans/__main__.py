"""`python -m dtrans`: the command line without the `dtrans` script."""

from dtrans.cli import main


if __name__ == "__main__":
    main()
