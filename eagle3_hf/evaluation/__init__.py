"""Measuring what a head promises: the same text (`check`), sooner (`bench`), on known questions (`tasks`)."""
