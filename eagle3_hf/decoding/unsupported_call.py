"""The error for calls of `generate` that a draft cannot serve, which an attached draft leaves to ordinary decoding."""


class UnsupportedCall(ValueError):
    """A call that is valid without a draft, but not with one.

    Args:
        kind: Name of what is not supported, such as the argument; it is the same for all its values.
        message: What was given, and what to do.
    """

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind
