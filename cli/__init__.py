"""The `flashnext` command: the only package that talks to people.

Entry point: `cli.app.main`. Commands lie in `cli/commands`, one a file; `cli/console.py` formats
everything shown.
"""
