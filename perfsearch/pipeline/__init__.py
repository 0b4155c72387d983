"""The stages of a search, each of which reads and returns plain values, and their order."""
