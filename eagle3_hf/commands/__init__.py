"""The sub-commands of `eagle3-hf`, one module each: `add` declares its arguments, `run` does the job."""
