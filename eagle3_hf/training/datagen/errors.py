"""What a server that writes answers can fail with; known without the package that asks it."""


class ServerError(RuntimeError):
    """The server cannot be used: it is away, or rejects the key or the model."""
