"""Helpers of several test modules. No test module imports another."""
