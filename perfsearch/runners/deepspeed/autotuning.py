"""The ``autotuning`` section of a DeepSpeed file: each key is honoured, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsearch.config.schema import Selected
from perfsearch.core.errors import BadInputError, nearest
from perfsearch.core.objective import Budget, Metric

if TYPE_CHECKING:
    from perfsearch.config.schema import Settings

SECTION = "autotuning"

_REFUSED = {
    "metric_path": "it is where an experiment of DeepSpeed's tuner reports to it; the metrics of "
    "every trial are in trials.csv of the run directory. Remove it",
    "model_info_path": "it is where DeepSpeed's profile run reports, and there is none here: the "
    "first trial tells the model's size. Remove it",
    "start_step": "DeepSpeed itself reads start_profile_step only. Rename it",
    "end_step": "DeepSpeed itself reads end_profile_step only. Rename it",
}
_MODEL_INFO = ("profile", "num_params", "hidden_size", "num_layers")
_TUNERS = {"gridsearch": "grid", "random": "random", "model_based": "bayes"}
_METRICS = ("throughput", "latency", "flops")


@dataclass(frozen=True)
class Autotuning:
    """What the section asks for; ``None`` where it leaves the choice.

    Attributes:
        fast: whether only stage and batch are searched, not the stages' own settings.
        results_dir: where the tuned file, the command and the summary go.
        exps_dir: where the configuration of each experiment goes.
        overwrite: whether an older result there is replaced rather than kept beside.
        start_profile_step: first step that is scored, counted from 1.
        end_profile_step: last step that is scored.
        metric: ``throughput`` or ``latency``.
        tuner_type: ``gridsearch``, ``random`` or ``model_based``; used without ``fast``.
        tuner_early_stopping: trials without a new best after which a search ends.
        tuner_num_trials: most trials.
        arg_mappings: option of the script by the key whose value it takes.
        max_train_batch_size: largest global batch.
        min_train_batch_size: smallest global batch.
        max_train_micro_batch_size_per_gpu: largest micro-batch.
        min_train_micro_batch_size_per_gpu: smallest micro-batch.
        num_tuning_micro_batch_sizes: micro-batches measured in each stage.
        mp_size: ranks that share one copy of the model.
        num_params: parameters of the model, where they are stated.
        given: keys that stand in the section.

    """

    fast: bool = True
    results_dir: Path = Path("autotuning_results")
    exps_dir: Path = Path("autotuning_exps")
    overwrite: bool = True
    start_profile_step: int | None = None
    end_profile_step: int | None = None
    metric: str = "throughput"
    tuner_type: str = "gridsearch"
    tuner_early_stopping: int = 5
    tuner_num_trials: int = 50
    arg_mappings: Mapping[str, str] = field(default_factory=dict)
    max_train_batch_size: int | None = None
    min_train_batch_size: int = 1
    max_train_micro_batch_size_per_gpu: int = 1024
    min_train_micro_batch_size_per_gpu: int = 1
    num_tuning_micro_batch_sizes: int = 3
    mp_size: int = 1
    num_params: int | None = None
    given: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, configuration: Mapping[str, Any]) -> Autotuning:
        """Read the section, which may be absent.

        Raises:
            BadInputError: a key that is unknown or cannot be honoured, or a wrong value.

        """
        section = configuration.get(SECTION) or {}
        values: dict[str, Any] = {}
        known = {*cls.__dataclass_fields__} - {"given", "num_params"} | {"enabled", "model_info"}
        for name, value in section.items():
            if name in _REFUSED:
                raise BadInputError(f"{SECTION}.{name}={value}: {_REFUSED[name]}")
            if name not in known:
                raise BadInputError(f"{SECTION}.{name}: no such key. {nearest(name, known)}")
            if value is not None:
                values[name] = _checked(name, value)
        if values.pop("enabled", True) is False:
            raise BadInputError(
                f"{SECTION}.enabled=false: it says not to tune. Set it to true, or remove the "
                "section"
            )
        values.update(values.pop("model_info", {}))
        first, last = values.get("start_profile_step"), values.get("end_profile_step")
        if first is not None and last is not None and last <= first:
            raise BadInputError(
                f"{SECTION}.end_profile_step={last}: must be above start_profile_step={first}"
            )
        return cls(**values, given=frozenset(section))

    def strategy(self) -> tuple[str, dict[str, Any]]:
        """The strategy that does what the section describes, with its options."""
        if not self.fast:
            return _TUNERS[self.tuner_type], {}
        return "fast", {
            "early_stopping": self.tuner_early_stopping,
            "num_trials": self.tuner_num_trials,
            "num_micro_batches": self.num_tuning_micro_batch_sizes,
        }

    def profile_steps(self) -> tuple[int, int] | None:
        """First and last scored step where the section sets them, DeepSpeed's for one left out."""
        if self.start_profile_step is None and self.end_profile_step is None:
            return None
        first = self.start_profile_step or 3
        return first, self.end_profile_step or max(5, first + 1)


def _checked(name: str, value: Any) -> Any:
    """The value in its type."""
    key = f"{SECTION}.{name}"
    if name in ("enabled", "fast", "overwrite"):
        if not isinstance(value, bool):
            raise BadInputError(f"{key}={value}: allowed are true and false")
        return value
    if name in ("results_dir", "exps_dir"):
        if not isinstance(value, str) or not value:
            raise BadInputError(f"{key}={value}: the path of a directory is needed")
        return Path(value)
    if name == "metric":
        return _metric(key, value)
    if name == "tuner_type":
        if value not in _TUNERS:
            raise BadInputError(f"{key}={value}: unknown. {nearest(str(value), _TUNERS)}")
        return value
    if name == "arg_mappings":
        return _mappings(key, value)
    if name == "model_info":
        return _model_info(key, value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadInputError(f"{key}={value}: a whole number from 1 is needed")
    return value


def _metric(key: str, value: Any) -> str:
    metric = str(value).lower()
    if metric not in _METRICS:
        raise BadInputError(f"{key}={value}: unknown. {nearest(metric, _METRICS)}")
    if metric == "flops":
        raise BadInputError(
            f"{key}={value}: operations of a script are not counted, and for one model they rank "
            "as samples per second do. Set it to throughput"
        )
    return metric


def _mappings(key: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
        raise BadInputError(
            f'{key}={value}: an object such as {{"train_micro_batch_size_per_gpu": '
            '"--per_device_train_batch_size"} is needed'
        )
    flags = {str(k).strip(): v.strip() for k, v in value.items()}
    return {k: v if v.startswith("-") else f"--{v}" for k, v in flags.items()}


def _model_info(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise BadInputError(f"{key}={value}: an object with num_params is needed")
    for name in value:
        if name not in _MODEL_INFO:
            raise BadInputError(f"{key}.{name}: no such key. {nearest(name, _MODEL_INFO)}")
    count = value.get("num_params")
    if count is None:
        return {}  # no profile run is needed, whether it is asked for or not
    if isinstance(count, bool) or not isinstance(count, int | float) or count < 1:
        raise BadInputError(f"{key}.num_params={count}: a number of parameters is needed")
    return {"num_params": int(count)}


# -----------------------------------------------------------------------------
# What the ``autotuning`` section of a DeepSpeed file means for the search's own keys.

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
    if "tuner_num_trials" in section.given and budget.trials == Budget.trials:
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
