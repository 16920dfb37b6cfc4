"""Why a call inside the cluster is refused.

CredentialsError
├── NotProven            the caller did not prove who it is: no proof, or a forged or used one
├── WrongIncarnation     a genuine caller means another start of this process
└── NotAllowed           a genuine caller may not call this method

gate.py maps them to status codes.
"""


class CredentialsError(Exception):
    """Base of all refusals."""


class NotProven(CredentialsError):
    """The caller did not prove who it is."""


class WrongIncarnation(CredentialsError):
    """A genuine caller means another start of this process."""


class NotAllowed(CredentialsError):
    """A genuine caller may not call this method."""
