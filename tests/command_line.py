"""`python -m mxquant` in this process."""

from mxquant.cli import main


def run(*arguments: object) -> int:
    """The exit code of a command."""
    return main([str(argument) for argument in arguments])
