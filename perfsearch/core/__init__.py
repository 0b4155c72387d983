"""What every part shares: knobs, spaces, trials, the journal, budgets, statistics.

Nothing here imports torch, Hydra, MLflow or scikit-learn.
"""
