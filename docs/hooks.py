"""Brings pages from outside ``docs`` into the site, and turns their links.

The README is the front page; results, contributing and changelog are pages too. A link in any of
them is written as it holds in the repository, so that it works there; here it is turned into one
that works on the site. What a page links to and is no page (an example) is copied beside it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
_ALSO = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "LICENSE",
    "benchmarks/README.md": "benchmarks/index.md",
}
_LINK = re.compile(r"(?<=\])\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_EACH = "*"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put a page for each file where the navigation says ``DIRECTORY/*``."""
    config.nav = list(_filled(config.nav or []))
    return config


def _filled(entries: list[Any]) -> Iterator[Any]:
    for entry in entries:
        if isinstance(entry, str) and entry.endswith(_EACH):
            folder = entry.removesuffix(f"/{_EACH}")
            where = ROOT if folder.startswith("benchmarks") else ROOT / "docs"
            yield from (f"{folder}/{path.name}" for path in sorted((where / folder).glob("*.md")))
        elif isinstance(entry, dict):
            yield {
                title: list(_filled(below)) if isinstance(below, list) else below
                for title, below in entry.items()
            }
        else:
            yield entry


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside, and the files that pages link to."""
    results = (ROOT / "benchmarks" / "results").glob("*.md")
    also = {**_ALSO, **{_within(path): _within(path) for path in results}}
    for source, place in also.items():
        files.append(_file(ROOT / source, place, config))
    for page in [*files.documentation_pages()]:
        source = Path(str(page.abs_src_path))
        targets = {_target(source, match) for match in _LINK.finditer(source.read_text())}
        for target in sorted(targets - also.keys()):
            if not target.startswith("docs/"):
                _bring(target, files, config)
    return files


def _bring(target: str, files: Files, config: MkDocsConfig) -> None:
    """Add a file that a page links to, or a directory with a page that lists its files."""
    path = ROOT / target
    if not path.exists():
        raise PluginError(f"a page links to {target}, which does not exist")
    if path.is_dir():
        inside = sorted(_within(file) for file in path.iterdir() if file.is_file())
        lines = [f"- [{posixpath.basename(file)}]({posixpath.basename(file)})" for file in inside]
        page = f"# {target}\n\n" + "\n".join(lines) + "\n"
        index = File.generated(config, f"{target}/index.md", content=page)
        index.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(index)
        for file in inside:
            _bring(file, files, config)
    elif files.get_file_from_path(target) is None:
        files.append(_file(path, target, config))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that hold in the repository into those that hold on the site."""
    if page.file.abs_src_path is None:
        return markdown  # a list of files
    source = Path(str(page.file.abs_src_path))

    def mended(match: re.Match[str]) -> str:
        target = _target(source, match)
        place = _ALSO.get(target, target.removeprefix("docs/"))
        place += "/index.md" if (ROOT / target).is_dir() else ""
        here = posixpath.dirname(page.file.src_uri)
        return f"({posixpath.relpath(place, here or '.')}{match[2] or ''})"

    return _LINK.sub(mended, markdown)


def _target(source: Path, match: re.Match[str]) -> str:
    """What a link names, seen from the repository's root."""
    return posixpath.normpath(posixpath.join(_within(source.parent), match[1]))


def _within(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _file(source: Path, place: str, config: MkDocsConfig) -> File:
    return File.generated(config, place, abs_src_path=str(source))
