"""Parts of the documentation that are made when the site is built: the API page, and links that leave docs/."""

import inspect
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY_FILES = re.compile(
    r"\[([^]]*)\]\((?:\.\./)+(README|CONTRIBUTING|results|configs|src|benchmarks|tests)([^)\s]*)\)"
)
IMAGES = re.compile(r"!\[([^]]*)\]\((?:\.\./)+(results/[^)\s]+\.svg)\)")


def on_files(files: Files, config: Any) -> Files:
    """The API page, and the pictures of results/ that pages show."""
    files.append(File.generated(config, "api.md", content=api_page()))
    for picture in sorted((ROOT / "results").glob("*/*.svg")):
        name = picture.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, content=picture.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Pictures are part of the site; a link to another file of the repository becomes the file's name."""
    up = "../" * page.file.src_uri.count("/")
    pictures = IMAGES.split(markdown)
    kept = [REPOSITORY_FILES.sub(r"\1 (`\2\3`)", text) for text in pictures[::3]]
    drawn = [f"![{alt}]({up}{name})" for alt, name in zip(pictures[1::3], pictures[2::3], strict=True)]
    return "".join(text + picture for text, picture in zip(kept, [*drawn, ""], strict=True))


def api_page() -> str:
    """Everything that `import fedmoe` and `fedmoe.contract` export, with signatures and docstrings."""
    import fedmoe
    import fedmoe.contract

    parts = ["# API\n"]
    for module in (fedmoe, fedmoe.contract):
        parts.append(f"## `{module.__name__}`\n\n{inspect.getdoc(module) or ''}\n")
        parts += [entry(name, getattr(module, name)) for name in sorted(module.__all__) if not name.startswith("_")]
    return "\n".join(parts)


def entry(name: str, thing: Any) -> str:
    try:
        signature = str(inspect.signature(thing)) if callable(thing) else ""
    except ValueError:
        signature = ""
    shown = re.sub(r"<([\w.]+) object at 0x[0-9a-f]+>", r"\1", f"{name}{signature}")
    words = inspect.getdoc(thing) if callable(thing) or inspect.ismodule(thing) else ""
    return f"### `{name}`\n\n```python\n{shown}\n```\n\n```text\n{words or ''}\n```\n"
