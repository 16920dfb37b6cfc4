"""Why a call inside the cluster is refused.

CredentialsError
├── NotProven            the caller did not prove who it is: no proof, or a forged or used one
├── WrongIncarnation     a genuine caller means another start of this process
└── NotAllowed           a genuine caller may not call this method

gate.py maps them to status codes.

KeyFileError             a file with keys cannot be used; the message says why
"""


class CredentialsError(Exception):
    """Base of all refusals."""


class NotProven(CredentialsError):
    """The caller did not prove who it is."""


class WrongIncarnation(CredentialsError):
    """A genuine caller means another start of this process, whose incarnation it is told."""

    def __init__(self, message: str, incarnation: int) -> None:
        super().__init__(message)
        self.incarnation = incarnation


class NotAllowed(CredentialsError):
    """A genuine caller may not call this method."""


class KeyFileError(Exception):
    """A file with keys, or the secret, cannot be read or written, or has something else in it."""
