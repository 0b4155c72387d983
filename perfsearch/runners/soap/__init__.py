"""Plans by operator: the runner over ``perfsearch.soap``."""
