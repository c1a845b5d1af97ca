"""`Eagle3Trainer` and a whole training run."""
