"""The error that an export raises."""


class ExportError(ValueError):
    """The engine cannot run the head as it is. The message lists every reason, and nothing was written."""


__all__ = ["ExportError"]
