"""Diagnosis of a head on its target: why few drafts are accepted, and what to do about it."""
