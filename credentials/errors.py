"""Why a call inside the cluster is refused.

CredentialsError
├── NotProven            the caller did not prove who it is: no proof, or a forged or used one
├── WrongIncarnation     a genuine caller means another start of this process
└── NotAllowed           a genuine caller may not call this method

gate.py maps them to status codes.

KeyFileError             a file with keys cannot be used; the message says why
OpenInClear              a server would listen in clear where other hosts connect
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


class OpenInClear(Exception):
    """A server would listen in clear where other hosts connect.

    Args:
        option: That names the certificate which it lacks.
        host: Where it would listen.
    """

    def __init__(self, option: str, host: str) -> None:
        self.option = option
        super().__init__(
            f"{option} is not set, and a server would listen on {host}, where other hosts connect, "
            "in clear; set it with its key, or say that this is meant with insecure"
        )
