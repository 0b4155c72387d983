"""Predicts a plan's step time, and searches plans by a Markov chain on it."""
