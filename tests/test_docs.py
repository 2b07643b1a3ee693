"""README.md and docs/: every command and every block of Python is run, and links lead somewhere (how: `documents`).

``make docs`` writes what is printed now into the pages.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from _pytest.mark.structures import ParameterSet

from autoddl.cli._running import parser_of
from autoddl.pipelines.runtime.load import is_available

from .autoddl.launches import forget_jobs
from .documents import PAGES, REASONS, ROOT, Block, Run, blocks_of, commands_of, shape
from .sharedranks import lending

TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
BLOCKS = {page: blocks_of(text) for page, text in TEXTS.items()}
#: Programs of command lines that are not run, and not ours.
_OTHERS = {
    "chromium",
    "grep",
    "make",
    "mpirun",
    "nft",
    "pip",
    "python3",
    "srun",
    "unshare",
    "xdg-open",
    ".venv/bin/python",
}
#: Of fences: what is run, what is written to a file, and what is for reading.
_LANGUAGES = {"console", "python", "pycon", "json", "csv", "text", "mermaid"}
#: Arguments of our commands that are files which they read.
_READ = (
    "plan",
    "script",
    "model",
    "subject",
    "cluster",
    "measurements",
    "hostfile",
    "text",
    "against",
    "base",
    "profile",
)


def _starts_ranks(page: str) -> bool:
    return any({"ranks", "counted"} & set(block.attributes.get("needs", "").split()) for block in BLOCKS[page])


def _unit(page: str) -> list[pytest.MarkDecorator]:
    """Pages that start ranks run beside nothing else that does; pages that launch jobs, beside no other launches."""
    if not _starts_ranks(page):
        return []
    launches = any(c.words.startswith("autoddl launch") for b in _consoles(page, is_run=True) for c in commands_of(b))
    return [pytest.mark.ranks("launches") if launches else pytest.mark.ranks, pytest.mark.slow]


def _pages() -> list[ParameterSet]:
    """Those with something to run."""
    pages = (page for page in PAGES if any(block.is_run for block in BLOCKS[page]))
    return [pytest.param(page, marks=_unit(page)) for page in pages]


def _consoles(page: str, *, is_run: bool) -> list[Block]:
    return [block for block in BLOCKS[page] if block.language == "console" and block.is_run == is_run]


@pytest.mark.parametrize("page", _pages())
def test_every_command_of_a_page_prints_what_the_page_has(page, tmp_path, monkeypatch, request):
    """A page is a whole session: plans, runs on ranks that are started for it, and what comes of them."""
    monkeypatch.chdir(tmp_path)
    forget_jobs(monkeypatch)
    is_written = request.config.getoption("--write-docs")
    run = Run(page, is_written=is_written)
    if _starts_ranks(page) and is_available():
        with lending(request.getfixturevalue("ranks")):
            run.blocks(BLOCKS[page])
    else:
        run.blocks(BLOCKS[page])
    if is_written:
        (ROOT / page).write_text(run.text(TEXTS[page]), encoding="utf-8")
    if run.left_out:
        left_out = (f"lines {', '.join(map(str, lines))}: {reason}" for reason, lines in run.left_out.items())
        pytest.skip(f"{run.count} blocks ran, but not those of {'; '.join(left_out)}")


# ---- Commands that are not run ---------------------------------------------------------------------------------------------


def _skipped() -> Iterator[tuple[str, str, str]]:
    for page in PAGES:
        for block in _consoles(page, is_run=False):
            yield from ((page, block.attributes["skip"], command.words) for command in commands_of(block))


def test_commands_that_are_not_run_say_why_and_are_few():
    """All are named in the failure, and in the report of ``pytest -rP``."""
    found = list(_skipped())
    for page, reason, words in found:
        print(f"{page}: {reason}: {words}")
        assert reason in REASONS, f"{page}: {words}"
    num_run = sum(len(commands_of(block)) for page in PAGES for block in _consoles(page, is_run=True))
    print(f"{num_run} commands are run, {len(found)} are not")
    assert num_run > len(found)


@pytest.mark.parametrize("page", PAGES)
def test_no_command_stands_where_it_is_not_seen(page):
    """Fences say what they are; commands are in those of the language ``console``."""
    for block in BLOCKS[page]:
        where = f"{page}:{block.line}"
        assert block.language in _LANGUAGES, f"{where}: the language {block.language!r} is none of {sorted(_LANGUAGES)}"
        known = {"console": {"exit", "needs", "skip"}, "text": {"file"}, "mermaid": set()}
        assert set(block.attributes) <= known.get(block.language, {"file", "of", "needs"}), where
    assert not re.search(r"^(    |\t)\s*(\$|autoddl|make|python3?|pip) ", _prose(page), re.M)


@pytest.mark.parametrize("page", sorted({page for page, _, _ in _skipped()}))
def test_command_lines_that_are_not_run_can_be_read(page):
    """By the parsers of our commands; targets of make and scripts exist; files come from what stands before on the page."""
    there: set[str] = set()
    for block in BLOCKS[page]:
        there |= {block.attributes[name] for name in ("file",) if name in block.attributes}
        for command in commands_of(block) if block.language == "console" else []:
            parts = shlex.split(re.split(r" [|>] ", command.words.replace("\\\n", " "))[0], comments=True)
            if "skip" in block.attributes:
                _check_command(page, parts, there)
            there |= _files(command.words.split())


def _check_command(page: str, parts: list[str], there: set[str]) -> None:
    assert parts[0] in {"autoddl", *_OTHERS}, f"{page}: {parts}"
    if parts[0] == "make":
        assert re.search(rf"^{parts[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M), f"{page}: {parts}"
    read = parts[1:2] if parts[0].endswith("python") else []
    if parts[0] == "autoddl":
        arguments = parser_of(parts[1:]).parse_args(parts[1 : parts.index("--") if "--" in parts else None])
        for value in (getattr(arguments, name, None) for name in _READ):
            read += value if isinstance(value, list) else [value] if value else []
    for name in _files(read):
        assert name in there or (ROOT / name).exists(), f"{page}: nothing before makes {name}: {' '.join(parts)}"


def _files(words: list[str]) -> set[str]:
    """The names of files among these words; of ``FILE.py:FUNCTION`` that of the file."""
    names = (word.rpartition(":")[0] if ".py:" in word else word for word in words)
    return {name for name in names if re.search(r"\.(csv|html|json|log|py|txt)$", name)}


# ---- Links -----------------------------------------------------------------------------------------------------------------


def _prose(page: str) -> str:
    """A page without its fences."""
    lines = TEXTS[page].split("\n")
    for block in BLOCKS[page]:
        lines[block.line : block.line + len(block.text)] = [""] * len(block.text)
    return "\n".join(lines)


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """Within the repository: nothing is fetched."""
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", _prose(page))):
        if target.startswith(("https://", "mailto:")):
            continue
        name, _, anchor = unquote(target).partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page}: {target}"
        assert not anchor or anchor in _anchors(path), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES)
def test_code_that_is_named_is_there(page):
    """`` `folder/module.py` ``, and `` `folder/module.py::name` `` with a definition of that name."""
    folders = "autoddl|calib|costmodel|docs|examples|pipelines|search|tests"
    for path, name in re.findall(rf"`((?:{folders})/[\w./*-]*)(?:::(\w+))?`", _prose(page)):
        if "*" in path:
            assert list(ROOT.glob(path)), f"{page}: {path}"
            continue
        file = ROOT / path
        assert file.exists(), f"{page}: {path}"
        if name:
            definition = rf"^\s*(?:def|class) {name}\b|^{name}\b.*="
            assert re.search(definition, file.read_text(encoding="utf-8"), re.M), f"{page}: {path}::{name}"


def test_the_index_has_every_page():
    listed = set(re.findall(r"\]\(([\w-]+\.md)", TEXTS["docs/README.md"]))
    assert listed == {Path(page).name for page in PAGES if page.startswith("docs/")} - {"README.md"}


def test_the_readme_fits_on_a_few_screens():
    assert TEXTS["README.md"].count("\n") <= 250


# ---- The comparison itself --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, same, others",
    [
        (
            "  step  9.36 s  54.7 sequences/s",
            "  step     936 ms    1,154.7 sequences/s",
            ["  step  9.36 s", "  9.36 s"],
        ),
        ("error  +1.07 ms  1.071x", "error    -210 us  0.9x", ["error  +1.07 ms  1.071"]),
        ("  h.*.ln_1 x 40  (8,1,1) | (2,4,1)", "  h.*.ln_1 x 12   (2,1,1) | (4,2,1)", ["  h.*.ln_1 x 12  (2,1,1)"]),
        ("loss 1e-05", "loss 2.4e-07", ["lost 1e-05"]),
    ],
)
def test_shapes_have_words_and_columns_but_no_figures(line, same, others):
    assert shape(line) == shape(same)
    assert all(shape(line) != shape(other) for other in others)


PAGE = """
```console
$ echo one 1; echo two
one 2
two
$ echo a; echo b; echo c; echo d or more
a
...
d ...
```
```text file=data.txt
a
b
c
```
```text of=data.txt
b
```
```pycon
>>> 3 + 4
5
>>> for i in range(2):
...     print("row", i)
row 0
row 1
```
"""


def test_a_page_is_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Run("page.md")
    run.blocks(blocks_of(PAGE))
    assert run.count == 4 and not run.left_out
    for wrong in (
        PAGE.replace("two\n$", "$"),
        PAGE.replace("\n...\nd ...\n", "\n...\nd ...\ne\n"),
        PAGE.replace("\n...\nd ...\n", "\n...\nc\n"),
        PAGE.replace("\n...\nd ...\n", "\n...\nd\n"),
        PAGE.replace("a\n...\nd ...\n", "b\n...\nd ...\n"),
        PAGE.replace("```text of=data.txt\nb", "```text of=data.txt\nb\na"),
        PAGE.replace("row 1", "line 1"),
        PAGE.replace("```console", "```console exit=2"),
    ):
        assert wrong != PAGE
        with pytest.raises(AssertionError, match=r"^page\.md:\d+: "):
            Run("page.md").blocks(blocks_of(wrong))


def test_a_page_is_written_as_it_is_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Run("page.md", is_written=True)
    stale = PAGE.replace("two\n$", "three\n$")
    run.blocks(blocks_of(stale))
    assert run.text(stale) == PAGE.replace("one 2", "one 1").replace("4\n5\n", "4\n7\n")


def test_what_is_not_there_is_left_out_and_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Run("page.md")
    run.blocks(blocks_of('```python needs="autoddl.nothing"\n1 / 0\n```\n'))
    assert run.left_out == {"there is no function autoddl.nothing": [1]} and run.count == 0
