"""Draft, verify, accept, commit: the loop behind `generate(assistant_model=draft)`."""
