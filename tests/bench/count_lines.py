"""How many lines the code has, folder by folder: all of them, and those of code alone (no docstrings, comments or empty lines).

python tests/bench/count_lines.py [CHECKOUT]
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

FOLDERS = ("autoddl", "costmodel", "search", "pipelines", "calib", "tests")
_NOT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def code_lines(text: str) -> int:
    """Lines that have a token of code and are no part of a docstring.

    >>> code_lines('def f():\\n    "Nothing."\\n\\n    return 0  # of course\\n')
    2
    """
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        for statement in node.body if isinstance(getattr(node, "body", None), list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                documented |= set(range(statement.lineno, (statement.end_lineno or 0) + 1))
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in _NOT_CODE]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - documented)


def main(root: Path) -> None:
    """Print a row for each folder."""
    print(f"{'folder':12}{'lines':>8}{'code':>8}")
    for folder in FOLDERS:
        texts = [path.read_text() for path in sorted((root / folder).rglob("*.py"))]
        print(f"{folder:12}{sum(text.count(chr(10)) for text in texts):8,}{sum(map(code_lines, texts)):8,}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if sys.argv[1:] else "."))
