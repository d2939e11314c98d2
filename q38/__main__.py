"""Entry point of the `q38` command and of `python -m q38`."""

from q38.cli.app import main

if __name__ == "__main__":
    main()
