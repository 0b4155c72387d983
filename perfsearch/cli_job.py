"""What Hydra calls once a search: from a composed configuration to an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from perfsearch.cli_errors import explain
from perfsearch.config import Settings, validate
from perfsearch.core.errors import BadInputError
from perfsearch.core.signals import ExitCode, Interrupted


def plain(config: Any, complete: bool = True) -> dict[str, Any]:
    """The composed configuration as plain dicts, lists and scalars, without Hydra's own node.

    Args:
        config: what Hydra composed.
        complete: whether a key that still needs a value is an error.

    """
    from omegaconf import OmegaConf, open_dict

    with open_dict(config):
        config.pop("hydra", None)
    container = OmegaConf.to_container(config, resolve=True, throw_on_missing=complete)
    assert isinstance(container, dict)
    return {str(k): v for k, v in container.items()}


class JobFailedError(Exception):
    """A job of a sweep in another process ended with an exit code other than 0.

    Attributes:
        exit_code: which.

    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class Job:
    """What Hydra calls once a job, in this process or, by another launcher, in a new one.

    Args:
        run: does what the settings ask for and returns the exit code.
        given: keys that go before the composed ones, values as they are.

    """

    def __init__(
        self, run: Callable[[Settings], int], given: Mapping[str, Any] | None = None
    ) -> None:
        self.run = run
        self.given = dict(given or {})
        self.exit_codes: list[int] = []
        self.process = os.getpid()

    def __call__(self, config: Any) -> None:
        """Run the search that ``config`` asks for, and note its exit code.

        Raises:
            Interrupted: a signal ended it, so that no further job is started.
            JobFailedError: it failed in a process that cannot hand its code back otherwise.

        """
        os.environ.pop("HYDRA_FULL_ERROR", None)
        code = _exit_code(config, self.given, self.run)
        self.exit_codes.append(code)
        if code in (ExitCode.SIGHUP, ExitCode.SIGINT, ExitCode.SIGTERM):
            raise Interrupted(ExitCode(code))
        if code and os.getpid() != self.process:
            raise JobFailedError(code)


def _merged(composed: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The composed keys with the given ones in their place, group by group."""
    merged = dict(composed)
    for name, value in given.items():
        below = merged.get(name)
        nested = isinstance(value, Mapping) and isinstance(below, dict)
        merged[name] = _merged(below, value) if nested else value  # type: ignore[arg-type]
    return merged


def _exit_code(config: Any, given: Mapping[str, Any], run: Callable[[Settings], int]) -> int:
    try:
        try:
            settings = validate(_merged(plain(config), given))
        except BadInputError:
            raise
        except Exception as error:
            message = explain(error, dict)
            if message is None:
                raise
            raise BadInputError(message) from error
        return run(settings)
    except BadInputError as error:
        print(f"perfsearch: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    except Exception:
        traceback.print_exc()
        return ExitCode.NO_TRIAL_SUCCEEDED
