"""What every part shares: knobs, spaces, trials, the journal, budgets, intervals.

Nothing here imports torch, Hydra, MLflow or scikit-learn.
"""
