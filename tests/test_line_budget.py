"""The package stays small enough to read in an evening. `python tests/count_lines.py` prints the same, file by file."""

import ast

import pytest
from count_lines import count, package_files

FILES = {path.name: path.read_text(encoding="utf-8") for path in package_files()}
MAX_CODE, MAX_LINES, MAX_FUNCTION = 1500, 2100, 50


def test_the_package_keeps_within_its_budget():
    code, lines = (sum(each) for each in zip(*map(count, FILES.values()), strict=True))
    assert code <= MAX_CODE and lines <= MAX_LINES, f"{code} lines of code and {lines} in all: make something simpler"


@pytest.mark.parametrize("name", FILES)
def test_no_function_is_longer_than_a_page(name):
    functions = [node for node in ast.walk(ast.parse(FILES[name])) if isinstance(node, ast.FunctionDef)]
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in functions}
    assert not {function: length for function, length in lengths.items() if length > MAX_FUNCTION}


def test_what_counts_as_code():
    lines = ['"""One.', "", 'Two."""', "", 'X = """', "a", '"""  # a string is code', "", "# A comment."]
    lines += ["def f():", '    """Doc."""', "    return (", "        1", "    )"]
    assert count("\n".join(lines)) == (3 + 1 + 3, 14)
