"""What every part shares: knobs, spaces, trials, the journal, budgets, statistics.

Nothing here imports torch, Hydra, MLflow or scikit-learn. The package can also be called:
``perfsearch.search(...)`` is ``perfsearch.api.search``, whose name it shares.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfsearch.pipeline import Result


class _CallablePackage(types.ModuleType):
    """A package that is a function as well, imported when it is called."""

    def __call__(self, *overrides: str, **keys: Any) -> Result:
        """Search; see ``perfsearch.api.search``."""
        from perfsearch.api import search

        return search(*overrides, **keys)


sys.modules[__name__].__class__ = _CallablePackage
