"""The five stages of a search, one module each; ``perfsearch.pipeline`` knows their order."""
