"""What a script sends out of reach: found in its source before it is started, and named.

Files are put back after each start; what was uploaded or written to a database is not.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

_MOST_FILES = 200

SERVICES = {
    "wandb": "WANDB_MODE=offline",
    "neptune": "NEPTUNE_MODE=offline",
    "comet_ml": "COMET_MODE=disabled",
    "clearml": "CLEARML_OFFLINE_MODE=1",
    "mlflow": "MLFLOW_TRACKING_URI=sqlite:////tmp/trials.db",
    "swanlab": "SWANLAB_MODE=disabled",
    "aim": "",
    "dvclive": "",
    "huggingface_hub": "HF_HUB_OFFLINE=1",
    "boto3": "",
    "s3fs": "",
    "gcsfs": "",
    "google.cloud.storage": "",
    "azure.storage": "",
    "psycopg": "",
    "psycopg2": "",
    "pymysql": "",
    "pymongo": "",
    "redis": "",
    "sqlalchemy": "",
    "smtplib": "",
}
"""Modules that reach beyond this machine's files, and a variable that keeps them from it."""

_SENDING = {
    ("requests", "post"),
    ("requests", "put"),
    ("requests", "patch"),
    ("requests", "delete"),
    ("httpx", "post"),
    ("httpx", "put"),
}
"""Functions of modules that also only read."""

_UPLOAD = "push_to_hub"
_OWN_STORE = "set_tracking_uri"
"""By which a script has MLflow send where the environment does not decide."""

_READS_ONLY = {"hf_hub_download", "snapshot_download", "try_to_load_from_cache", "login"}


def find_services(script: str, module: bool, arguments: Sequence[str] = ()) -> dict[str, str]:
    """What the script, or a module beside it, imports and calls that is beyond undoing.

    Args:
        script: its path, or the module's name.
        module: whether it is a module.
        arguments: the script's own.

    Returns:
        A variable of the environment for each that keeps it from sending, or an empty text.

    """
    found: dict[str, str] = {}
    own: set[str] = set()
    for tree in _sources(script, module):
        for name in _named(tree):
            service = next((s for s in SERVICES if f"{name}.".startswith(f"{s}.")), None)
            found[service or name] = SERVICES.get(service or "", "")
        if any(isinstance(n, ast.Attribute) and n.attr == _OWN_STORE for n in ast.walk(tree)):
            own.add("mlflow")
    if any(a.lstrip("-").partition("=")[0] == _UPLOAD for a in arguments):
        found.setdefault(_UPLOAD, "")
    return {name: "" if name in own else found[name] for name in sorted(found)}


def caution(services: dict[str, str]) -> str:
    """One line for the user; empty where there is nothing to say."""
    if not services:
        return ""
    ways = [variable for variable in services.values() if variable]
    how = f" To keep trials from it, set {' '.join(ways)} for the search." if ways else ""
    return (
        f"the script may use {', '.join(services)}: what trials send there is not undone, as files "
        f"are.{how}"
    )


_PROGRAMS = {("os", "system"), ("os", "popen"), ("subprocess", "")}
_OTHER_STARTS = ("spawn", "forkserver")
"""How ``multiprocessing`` starts processes that do not inherit what keeps files."""


def find_programs(script: str, module: bool) -> list[str]:
    """By what the script, or a module beside it, starts processes whose files nobody keeps."""
    found: set[str] = set()
    for tree in _sources(script, module):
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {a.name for a in node.names if (a.name, "") in _PROGRAMS}
            elif isinstance(node, ast.ImportFrom) and (node.module, "") in _PROGRAMS:
                found.add(str(node.module))
            elif isinstance(node, ast.Call):
                found |= _started_by(node)
    return sorted(found)


def _started_by(call: ast.Call) -> set[str]:
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    values = [node.value for node in given if isinstance(node, ast.Constant)]
    found = {f"multiprocessing by {value}" for value in values if value in _OTHER_STARTS}
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        name = function.value.id, function.attr
        found |= {".".join(name)} if name in _PROGRAMS else set()
    return found


def cautions(script: str, module: bool, arguments: Sequence[str]) -> list[str]:
    """What cannot be undone of a script's trials, a line each kind.

    Args:
        script: its path, or the module's name.
        module: whether it is a module.
        arguments: the script's own.

    """
    sends = caution(find_services(script, module, arguments))
    programs = find_programs(script, module)
    lines = [sends] if sends else []
    if programs:
        lines.append(
            f"the script may start other programs ({', '.join(programs)}): what those do to files "
            "is not undone, and named at the end"
        )
    return lines


def _sources(script: str, module: bool) -> Iterator[ast.Module]:
    """The script's source and that of the modules beside it which it imports, and so on."""
    first = _file_of_module(script) if module else Path(script)
    if first is None:
        return
    root = first.absolute().parent
    waiting, seen = [first.absolute()], set[Path]()
    while waiting and len(seen) < _MOST_FILES:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        yield tree
        for name in _imported(tree):
            path = name.lstrip(".").replace(".", "/")
            for base in {root, file.parent}:
                candidates = (base / f"{path}.py", base / path / "__init__.py")
                waiting += [c for c in candidates if path and c.is_file()]


def _file_of_module(name: str) -> Path | None:
    """Where the module's source is, found without running any of it."""
    path = name.replace(".", "/")
    beside = [Path(f"{path}.py"), Path(path, "__main__.py")]
    here = next((p for p in beside if p.is_file()), None)
    if here is not None or "." in name:
        return here
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def _imported(tree: ast.Module) -> Iterator[str]:
    """Names of modules, and of what may be modules in packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield base
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)


def _named(tree: ast.Module) -> Iterator[str]:
    """Services that the source imports, and calls that send."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if _is_service(a.name))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                sends = _is_service(whole) and alias.name not in _READS_ONLY
                if sends or (node.module, alias.name) in _SENDING:
                    yield whole
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if node.func.attr == _UPLOAD:
                yield _UPLOAD
            elif isinstance(owner, ast.Name) and (owner.id, node.func.attr) in _SENDING:
                yield f"{owner.id}.{node.func.attr}"


def _is_service(name: str) -> bool:
    return any(f"{name}.".startswith(f"{service}.") for service in SERVICES)
