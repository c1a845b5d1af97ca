"""Training-time test: the loss, the unroll over the head's own outputs, and its attention."""
