"""Runs a plan: each rank's part of every operator, and the exchanges between them."""
