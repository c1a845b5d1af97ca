"""The sub-commands of `eagle3-hf`, one module each: `add` declares the arguments, `run` executes the command."""
