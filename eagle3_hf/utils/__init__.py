"""Loggers and devices."""
