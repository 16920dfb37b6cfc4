"""Exceptions of kv_transfer.

TransferError
├── ConnectionBroken     the carrier failed, or did not answer before the deadline
├── TransferAborted      one of the two sides stopped the transfer
├── TransferTimeout      a protocol step did not come before its deadline
├── DigestMismatch       pages arrived with other contents than were sent
├── TransportRefused     one of the two workers does not have this transport
└── LayoutMismatch       the two workers' pages differ in shape, dtype or model
"""


class TransferError(Exception):
    """Base of all failures of a page transfer; none of them ever leaves a wrong page committed."""


class ConnectionBroken(TransferError):
    """The connection failed; it must be aborted and made again."""


class TransferAborted(TransferError):
    """One of the two sides gave up."""


class TransferTimeout(TransferError):
    """A step of the protocol did not come in time."""


class DigestMismatch(TransferError):
    """A received page differs from the digest that its sender told."""


class TransportRefused(TransferError):
    """One of the two workers does not have this transport; another one may do."""


class LayoutMismatch(TransferError):
    """The two sides cannot exchange pages at all."""
