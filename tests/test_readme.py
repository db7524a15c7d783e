"""What the two READMEs name exists: files, links, functions, subcommands, options, tests."""

import importlib
import pkgutil
import re
import shlex
import sys
from pathlib import Path

import pytest

import bench
import nanoserve

ROOT = Path(__file__).parents[1]
READMES = ["README.md", "README.vi.md"]
MODULES = [importlib.import_module(f"nanoserve.{module.name}") for module in pkgutil.iter_modules(nanoserve.__path__)]
NOT_OURS = {"EngineCore.step", "LLMEngine.step", "KVCacheManager.allocate_slots", "BlockPool", "PATH"}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def ours(text: str) -> str:
    """Without the column of the table of chapter sections that names vLLM's files and functions."""
    rows = [line.split(" | ") for line in text.splitlines()]
    return "\n".join(" | ".join(row[:2] + row[3:] if len(row) == 4 else row) for row in rows)


def spans(text: str) -> list[str]:
    """What stands in backticks, a line break being a space."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S))]


def resolve(name: str) -> bool:
    head, *rest = name.split(".")
    for module in MODULES:
        owner = getattr(module, head, None)
        if owner is not None and all(attribute_of(owner, part) for part in rest):
            return True
    return False


def attribute_of(owner: type, name: str) -> bool:
    """A method, property or field, or what __init__ assigns."""
    source = Path(sys.modules[owner.__module__].__file__).read_text() if isinstance(owner, type) else ""
    return hasattr(owner, name) or name in getattr(owner, "__annotations__", {}) or f"self.{name}" in source


def commands(text: str) -> set[str]:
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, flags=re.S)).splitlines()
    lines = [part.partition("#")[0].strip() for line in blocks for part in line.split("&&")] + spans(text)
    return {line for line in lines if line.startswith("python ")}


@pytest.mark.parametrize("name", READMES)
def test_links_and_paths_lead_somewhere(name):
    text = ours(read(name))
    paths = set(re.findall(r"\]\((?!https?:)([^)#]+)\)", text))
    paths |= {span for span in spans(text) if re.fullmatch(r"[\w./-]+\.(py|md|html|toml)", span)}
    assert len(paths) > 15
    paths -= {"trace.html"}  # which the reader makes
    assert not [path for path in paths if not (ROOT / path).exists() and not (ROOT / "nanoserve" / path).exists()]


@pytest.mark.parametrize("name", READMES)
def test_classes_and_functions_can_be_imported(name):
    names = {span.removesuffix("()") for span in spans(ours(read(name)))}
    names = {each for each in names if re.fullmatch(r"_?[A-Z]\w*[a-z]\w*(\.\w+)?", each)} - NOT_OURS
    assert len(names) > 8
    assert not [each for each in names if not resolve(each) and each not in dir(nanoserve)]


@pytest.mark.parametrize("name", READMES)
def test_commands_are_understood(name, monkeypatch):
    found = commands(read(name))
    assert len(found) >= 8
    for command in found:
        script, *arguments = shlex.split(command)[1:]
        if script == "bench.py":
            if arguments and arguments[0] not in ("SUBCOMMAND", "--help"):
                assert bench.parse(arguments).command in bench.COMMANDS
        elif script == "example.py":
            assert set(arguments) <= {"--trace", "trace.html"}
        elif script == "-m":
            assert arguments.pop(0) == "pytest", command
            files = [each for each in arguments if each.startswith("tests/")]
            assert all((ROOT / each).exists() for each in files), command
        else:
            assert (ROOT / script).exists(), command


def test_the_readme_fits():
    assert len(read("README.md").splitlines()) < 350
    for path in (ROOT / "nanoserve").glob("[a-z]*.py"):
        assert all(path.name in read(name) for name in READMES)
    for subcommand in bench.COMMANDS:
        assert f"`{subcommand}`" in read("README.md")
