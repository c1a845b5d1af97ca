"""Heads for the tests beside other engines, and the scripts that run in those engines' interpreters."""
