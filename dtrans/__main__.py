"""`python -m dtrans`: the command line, where its script is not on the path."""

from dtrans.cli import main


if __name__ == "__main__":
    main()
