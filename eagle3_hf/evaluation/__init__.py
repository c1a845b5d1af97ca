"""Measures a head: which texts it changes, how much sooner they are there, and what a round costs."""
