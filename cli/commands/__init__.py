"""The commands of `flashnext`, one a file."""
