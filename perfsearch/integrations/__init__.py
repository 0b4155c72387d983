"""Callbacks for training frameworks: tune a run while it trains, or set what a search has found.

``perfsearch.integrations.transformers`` is for Hugging Face's ``Trainer``,
``perfsearch.integrations.lightning`` for Lightning's. Importing this imports neither.
"""
