"""What the site needs beyond mkdocs.yml: pages that stand outside of docs/, lists as a code forge reads them, the decisions.

Pages link to one another as a code forge wants it, such as `../SECURITY.md` from docs/. The root of the site is docs/, where
files of the repository's root lie beside those of docs/; links are written anew to say so.
"""

import re
from pathlib import Path
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parent.parent
OUTSIDE = ("SECURITY.md", "benchmarks/results/*.md", "benchmarks/results/*.png")


class TwoSpaces(Extension):
    """What belongs to an item of a list is indented by two spaces or more; Python's Markdown wants four."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 (Markdown's name)
        md.tab_length = 2
        md.build_parser()  # its parts were made with the length before


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.markdown_extensions.insert(0, TwoSpaces())  # type: ignore[call-overload]  # before those that add to the parser
    decisions = sorted(path.name for path in (REPOSITORY / "docs/decisions").glob("*.md"))
    config.nav = [*(config.nav or []), {"Reasons": [{"Decisions": [f"decisions/{name}" for name in decisions]}]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for pattern in OUTSIDE:
        for path in sorted(REPOSITORY.glob(pattern)):
            name = path.relative_to(REPOSITORY).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Links from docs/ out of it stay in the site, and links from elsewhere into docs/ find it there.

    A link to a file that is not on the site, such as source, is its text alone.
    """
    up = "../" * page.file.src_uri.count("/")
    leads_over = f"{up}../" if page.file.generated_by is None else f"{up}docs/"

    def in_site(link: re.Match[str]) -> str:
        target = link["target"].partition("#")[0]
        is_there = files.get_file_from_path(target) is not None
        return f"[{link['text']}]({up}{link['target']})" if is_there else link["text"]

    return re.sub(rf"\[(?P<text>[^\]]*)\]\({re.escape(leads_over)}(?P<target>[^)]*)\)", in_site, markdown)
