"""Why a call inside the cluster is refused.

CredentialsError
├── NotProven            the caller's proof is missing, forged or was used before
├── WrongIncarnation     a genuine caller means another start of this process
└── NotAllowed           a genuine caller may not call this method

gate.py maps them to status codes.

KeyFileError             a file with keys cannot be used; the message says why
OpenInClear              a server would listen in clear where other hosts connect
"""


class CredentialsError(Exception):
    """Base of all refusals."""


class NotProven(CredentialsError):
    """The caller's proof is missing, forged or was used before."""


class WrongIncarnation(CredentialsError):
    """A genuine caller means another start of this process; it learns this incarnation."""

    def __init__(self, message: str, incarnation: int) -> None:
        super().__init__(message)
        self.incarnation = incarnation


class NotAllowed(CredentialsError):
    """A genuine caller may not call this method."""


class KeyFileError(Exception):
    """A file with keys or the secret cannot be read or written, or contains something else.

    The message follows the name of the option that names the file.
    """


class OpenInClear(Exception):
    """A server would listen in clear where other hosts connect.

    Args:
        option: The option that names the missing certificate.
        host: Where it would listen.
    """

    def __init__(self, option: str, host: str) -> None:
        self.option = option
        super().__init__(
            f"{option}: found none; allowed: a certificate, with its key, because other hosts can "
            f"connect to {host}; or none with insecure, which lets servers listen there in clear"
        )
