"""The one error that the kernels raise to their callers."""


class ShapeError(ValueError):
    """A tensor handed to a kernel breaks its contract.

    The message says which argument, the value it has and the value it should have. Nothing was written.
    """
