"""Where ranks start, one module each, imported when used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfsearch.core import registry

if TYPE_CHECKING:
    from perfsearch.config.schema import Settings
    from perfsearch.core.hardware import Environment
    from perfsearch.workers.launchers.base import Launcher


def names() -> list[str]:
    """Names that ``launcher=`` can take."""
    return registry.names(__name__)


def load(name: str) -> type[Launcher]:
    """Import the launcher ``name``.

    Raises:
        LookupError: there is none of that name.

    """
    from perfsearch.workers.launchers.base import Launcher

    return registry.load(__name__, "launcher", name, Launcher)  # type: ignore[type-abstract]


def of_settings(settings: Settings) -> Launcher:
    """The launcher that the settings name; nothing is opened yet.

    Raises:
        ConfigError: an option is wrong.

    """
    from perfsearch.config.options import build_options

    launcher = load(settings.launcher.name)
    options = build_options(launcher.Options, settings.launcher.options, "launcher")
    return launcher(options, settings.nnodes)


def of(environment: Environment | None) -> Launcher:
    """The launcher of an environment; this node alone where none is given."""
    from perfsearch.workers.launchers.base import Launcher
    from perfsearch.workers.launchers.local import Local

    given = None if environment is None else environment.launcher
    return given if isinstance(given, Launcher) else Local(Local.Options(), 1)
