"""What the ``autotuning`` section of a DeepSpeed file means for the search's own keys."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from perfsearch.config_schema import BudgetSettings, Selected
from perfsearch.core.errors import BadInputError
from perfsearch.core.objective import Metric
from perfsearch.runners._deepspeed_autotuning import Autotuning

if TYPE_CHECKING:
    from perfsearch.config import Settings

_OF_STRATEGY = frozenset(
    {
        "fast",
        "tuner_type",
        "tuner_early_stopping",
        "tuner_num_trials",
        "num_tuning_micro_batch_sizes",
    }
)
_UNCHOSEN = "auto"


def filled_in(settings: Settings, section: Autotuning) -> Settings:
    """The settings with what the section says where they stand at their defaults.

    Raises:
        BadInputError: the section asks for another metric than the user's own key.

    """
    budget = settings.budget
    if "tuner_num_trials" in section.given and budget.trials == _default("trials"):
        budget = replace(budget, trials=section.tuner_num_trials)
    if settings.strategy.name == _UNCHOSEN and section.given & _OF_STRATEGY:
        name, options = section.strategy()
        settings = replace(settings, strategy=Selected(name, options))
    elsewhere = settings.strategy.name != "fast"
    if "tuner_early_stopping" in section.given and elsewhere and budget.patience is None:
        budget = replace(budget, patience=section.tuner_early_stopping)
    objective = settings.objective
    if section.metric != objective.metric and "metric" in section.given:
        if objective.metric is not Metric.THROUGHPUT:
            raise BadInputError(
                f"autotuning.metric={section.metric}: objective.metric={objective.metric} is "
                "asked for. Leave one of them out"
            )
        objective = replace(objective, metric=Metric(section.metric))
    return replace(settings, budget=budget, objective=objective)


def _default(name: str) -> object:
    return next(f.default for f in fields(BudgetSettings) if f.name == name)
