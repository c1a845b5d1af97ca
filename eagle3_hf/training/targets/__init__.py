"""What the target says about training data: computed beside the head, or stored."""
