"""The target's side of a call: what it can verify, its forwards over trees, its cache."""
