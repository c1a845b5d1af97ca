"""What an export raises."""


class ExportError(ValueError):
    """A head that the wanted engine cannot run as it is; every reason is in the message, and nothing was written."""


__all__ = ["ExportError"]
