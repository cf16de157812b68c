"""Which part may know which: app -> ingest, app -> dflash_engine, and nothing else."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PARTS = ("app", "dflash_engine", "ingest")
MAY_KNOW = {"app": {"dflash_engine", "ingest"}, "dflash_engine": set(), "ingest": set()}


def imported_parts(path: Path, part: str) -> set[str]:
    """The parts of this project that a file imports, anywhere in it, by whatever form."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import():
                found |= {alias.name for alias in node.names}
            case ast.ImportFrom(level=0, module=str(module)):
                found.add(module)
            case ast.ImportFrom(level=level):
                # Relative: level 1 is the file's own folder. Beyond the part's root is outside.
                assert level <= len(path.relative_to(ROOT).parts) - 1, f"{path}: leaves {part}"
            case ast.Call(args=[ast.Constant(value=str(name)), *_]) if "import" in ast.unparse(
                node.func
            ):
                found.add(name)  # import_module("...") and __import__("...")
    return {name.split(".")[0] for name in found} & set(PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_knows_only_the_parts_it_may_know(part):
    files = sorted((ROOT / part).rglob("*.py"))
    assert files
    wrong = {
        str(path.relative_to(ROOT)): sorted(others)
        for path in files
        if (others := imported_parts(path, part) - MAY_KNOW[part] - {part})
    }
    assert wrong == {}


def test_the_front_door_does_know_both_others():
    known = set().union(*(imported_parts(path, "app") for path in (ROOT / "app").rglob("*.py")))
    assert known >= {"dflash_engine", "ingest"}
