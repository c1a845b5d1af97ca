"""Loggers, devices, and the drawing of plots."""
