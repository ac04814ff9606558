"""The errors of the tool."""

from collections.abc import Sequence

STATUS = {
    "usage": 2,
    "unpatched": 3,
    "out-of-date": 4,
    "interrupted": 5,
    "changed": 6,
    "busy": 7,
    "unsupported": 8,
    "not-found": 9,
}
"""Exit status by code; every other code's is 1. 2 is typer's own too."""


class PatchesError(Exception):
    """What is wrong and the way out, in one line; `details` may add lines.

    `code` is its kind, in a word, for machines.
    """

    def __init__(
        self, message: str, details: Sequence[str] = (), code: str = "refused"
    ) -> None:
        super().__init__(message)
        self.details = list(details)
        self.code = code


class UsageError(PatchesError):
    """The command line is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="usage")
