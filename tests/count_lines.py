"""Lines of code (without blanks, comments and docstrings) and lines in all, of each file of the package."""

import ast
import io
import tokenize
from pathlib import Path

SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def count(source: str) -> tuple[int, int]:
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in SILENT]
    code = {line for t in tokens for line in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            code -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(code), len(source.splitlines())


def package_files() -> list[Path]:
    return sorted((Path(__file__).parents[1] / "nanoserve").rglob("*.py"))


if __name__ == "__main__":
    total = (0, 0)
    for path in package_files():
        counts = count(path.read_text())
        total = (total[0] + counts[0], total[1] + counts[1])
        print(f"{path.name:24}{counts[0]:6}{counts[1]:6}")
    print(f"{'':24}{total[0]:6}{total[1]:6}")
