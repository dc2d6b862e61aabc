"""`python -m cli` is `flashnext`."""

from cli.app import main

if __name__ == "__main__":
    main()
