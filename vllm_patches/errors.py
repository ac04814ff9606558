"""The errors of the tool."""

from collections.abc import Sequence


class PatchesError(Exception):
    """What is wrong and the way out, in one line; `details` may add lines."""

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.details = list(details)


class UsageError(PatchesError):
    """The command line is wrong: exit status 2."""
