"""Errors that launchers raise before any launch.

KernelInputError (ValueError)
├── DtypeError      a tensor's dtype is not supported, or differs from its partner's
├── ScaleError      scales of an fp8 pool are missing, given for another pool, or not positive
├── ShapeError      a dimension does not fit the others, or no kernel exists for it
├── StrideError     a tensor does not have the layout that the kernel reads
├── DeviceError     a tensor is not on the kernel's device
├── CapacityError   a plan does not fit the buffers it was made for
├── PlanError       nothing is planned yet
└── PageTableError  a page or slot lies outside the pool or is written twice, or an entry lies
                    outside a table
"""


class KernelInputError(ValueError):
    """An argument does not fit the kernel; the message says what was found and what is allowed."""


class DtypeError(KernelInputError):
    """A dtype is not supported, or differs from its partner's."""


class ScaleError(KernelInputError):
    """Scales of an fp8 pool are missing, given for another pool, or not positive."""


class ShapeError(KernelInputError):
    """A dimension does not fit the others, or no kernel exists for it."""


class StrideError(KernelInputError):
    """A tensor does not have the layout that the kernel reads."""


class DeviceError(KernelInputError):
    """A tensor is not on the kernel's device."""


class CapacityError(KernelInputError):
    """A plan does not fit the buffers it was made for."""


class PlanError(KernelInputError):
    """Nothing is planned yet."""


class PageTableError(KernelInputError):
    """A page or slot lies outside the pool or is written twice, or an entry outside a table."""
