"""Damaged and contradictory heads, and what may come of loading one."""
