"""Training-time test: the unroll of a head over its own outputs, its attention, and its loss."""
