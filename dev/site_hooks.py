"""Hooks of mkdocs: links to files outside of docs/ become links to copies in the site."""

import pathlib
import posixpath
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]
_LINK = re.compile(r"\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
# Documents outside of docs/ are pages; other files are copied as text.
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "launch/README.md")


def _name(path: str) -> str:
    """Returns the path in the site of a file outside of docs/."""
    return f"repository/{path}" if path in DOCUMENTS else f"repository/{path}.txt"


def _resolved(target: str, folder: str) -> str | None:
    """Returns the path in the repository of a link that leaves docs/, else None."""
    if "://" in target or target.startswith("mailto:"):
        return None
    path = posixpath.normpath(posixpath.join("docs", folder, target))
    return path if not path.startswith("docs/") and (ROOT / path).is_file() else None


def on_files(files, config):
    """Adds the documents outside of docs/, and every file that a document links to."""
    sources = {name: ROOT / name for name in DOCUMENTS}
    pages = [(file.src_uri, pathlib.Path(file.abs_src_path)) for file in files.documentation_pages()]
    pages += [(f"../{name}", path) for name, path in sources.items()]
    for uri, path in pages:
        for match in _LINK.finditer(path.read_text()):
            linked = _resolved(match["target"], posixpath.dirname(uri))
            if linked and linked not in sources:
                sources[linked] = ROOT / linked
    for name, path in sources.items():
        files.append(File.generated(config, _name(name), content=path.read_text(errors="replace")))
    return files


def on_page_markdown(markdown, page, **_):
    """Points links at the copies."""
    uri = page.file.src_uri
    outside = uri.removeprefix("repository/") if uri.startswith("repository/") else None
    folder = posixpath.dirname(f"../{outside}" if outside else uri)

    def replace(match):
        target, anchor = match["target"], match["anchor"] or ""
        linked = _resolved(target, folder)
        if linked:
            target = posixpath.relpath(_name(linked), posixpath.dirname(uri))
        elif outside and "://" not in target:
            inside = posixpath.normpath(posixpath.join("docs", folder, target))
            if inside.startswith("docs/"):
                target = posixpath.relpath(inside.removeprefix("docs/"), posixpath.dirname(uri))
        return f"]({target}{anchor})"

    return _LINK.sub(replace, markdown)
