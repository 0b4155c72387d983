"""The user's own unchanged script: starts, trials inside one start, what is handed over."""
