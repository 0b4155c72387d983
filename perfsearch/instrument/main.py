"""What torch's launcher runs in each rank: the instruments, and then the script itself."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path

from perfsearch.ending import pause_at_end
from perfsearch.instrument.launchers import watch_for_launchers
from perfsearch.instrument.orders import VARIABLE, Orders
from perfsearch.instrument.patches import once
from perfsearch.instrument.report import lines
from perfsearch.instrument.script import Script


def say(text: str) -> None:
    """One line for people."""
    print(f"perfsearch: {text}", file=sys.stderr, flush=True)


def run_script(orders: Orders, arguments: list[str]) -> None:
    """Run the script as ``python SCRIPT ARGUMENTS`` or ``python -m MODULE ARGUMENTS`` would."""
    sys.argv = [orders.script, *arguments]
    if orders.module:
        runpy.run_module(orders.script, run_name="__main__", alter_sys=True)
        return
    path = os.path.join(os.getcwd(), orders.script)  # not tidied up, as Python does not
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    main = types.ModuleType("__main__")  # kept, so that workers and pickles find its classes
    main.__dict__.update(__file__=path, __cached__=None, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _reporting(script: Script, orders: Orders) -> None:
    """Have rank 0 say once what is in force: after some steps, or when the script ends."""
    steps, said = 0, False

    def say_once() -> None:
        nonlocal said
        if not said:
            said = True
            for line in lines(orders.knobs, orders.mapped, script.facts(), orders.given):
                say(line)

    def after_step() -> None:
        nonlocal steps
        steps += 1
        if steps == orders.report_after_steps:
            say_once()
            script.optimizers.after_step = None

    script.optimizers.before_step = once(script.put_into_force)
    script.losses.keeping = False
    script.loaders.counting = False
    says = orders.autotune is None or bool(orders.knobs or orders.mapped)
    if orders.report and says and os.environ.get("RANK", "0") == "0":
        script.optimizers.after_step = after_step
        atexit.register(say_once)


def without_our_frames(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """The part of a traceback that begins in the script."""
    ours = (__file__, str(Path(__file__).with_name("trial.py")), runpy.__file__)
    inner = traceback
    while inner is not None and inner.tb_frame.f_code.co_filename in (*ours, "<frozen runpy>"):
        inner = inner.tb_next
    return inner or traceback


def main() -> int:
    """Run the script of ``PERFSEARCH_SCRIPT``; return its exit code.

    The command line repeats the script's path, for those who look at the process table.
    """
    pause_at_end()
    orders = Orders.from_environment(os.environ)
    os.environ.pop(VARIABLE)  # not for what the script starts in its turn
    script = Script(orders.knobs)
    if orders.directory:
        from perfsearch.instrument.trial import run_searched

        return run_searched(script, orders)
    _reporting(script, orders)
    watch_for_launchers(orders.script, _once_said())
    if orders.autotune is not None:
        from perfsearch import online
        from perfsearch.online.options import AutotuneOptions

        online.enable(AutotuneOptions.from_mapping(orders.autotune))
    try:
        run_script(orders, sys.argv[2:])
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = without_our_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _once_said() -> Callable[[str], None]:
    said: set[str] = set()

    def warn(text: str) -> None:
        if text not in said:
            said.add(text)
            say(f"{text}. Knobs do not reach what it starts.")

    return warn


if __name__ == "__main__":
    sys.exit(main())
