"""The rooms: who may import whom, what the packages are, and what a file may look like."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest there

ROOT = Path(__file__).parent.parent
ROOMS = {"profiles": "specrun.profiles", "plugins": "specrun.plugins", "runtime": "specrun", "builder": "specbuild"}
ORDER = [*ROOMS, "tools"]  # each may import those before it; tools and tests stand side by side
FORBIDDEN = {
    "profiles": {"torch", "onnx", "onnx_ir", "transformers", "tensorrt", "triton", "cuda"},
    "plugins": {"torch", "onnx", "onnx_ir", "onnxruntime", "transformers"},
    "runtime": {"torch", "onnx", "onnx_ir", "transformers"},
    "builder": {"transformers"},
    "tools": set(),
}
LAZY = {"torch", "tensorrt", "tensorrt_rtx", "triton", "matplotlib", "cuda"}  # extras: never needed to import a room


def files(room: str) -> list[Path]:
    return sorted(path for path in (ROOT / room).rglob("*.py") if "__pycache__" not in path.parts)


def imports(path: Path) -> Iterator[tuple[str, ast.stmt, bool]]:
    """(module, statement, at the top level) of everything imported for more than its types."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node, node.col_offset == 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            yield from ((name, node, node.col_offset == 0) for name in names)


def room_of(module: str) -> str | None:
    if module.split(".")[0] in ("tools", "tests"):
        return module.split(".")[0]
    homes = sorted(ROOMS.items(), key=lambda item: -len(item[1]))
    return next((room for room, name in homes if module == name or module.startswith(name + ".")), None)


def test_imports_go_one_way():
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} imports {module}"
        for place, room in enumerate(ORDER)
        for path in files(room)
        for module, node, _ in imports(path)
        if (other := room_of(module)) is not None and other not in ORDER[: place + 1]
        if not (room == "tools" and other == "tests")
        if not (module == "specrun" and isinstance(node, ast.ImportFrom))  # `from specrun import profiles`
    ]
    assert not wrong, "\n".join(wrong)


def test_bare_folder_names_are_not_imported():
    bare = set(ROOMS)
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} imports {module}"
        for room in [*ORDER, "tests"]
        for path in files(room)
        for module, node, _ in imports(path)
        if module.split(".")[0] in bare
    ]
    assert not wrong, "\n".join(wrong)


def test_forbidden_and_heavy_libraries():
    """The runtime knows no torch, onnx or transformers; extras are imported where they are used, not on import."""
    wrong = []
    for room in ORDER:
        for path in files(room):
            for module, node, top in imports(path):
                library = module.split(".")[0]
                kernel = room == "plugins" and path.stem.endswith(("kernel", "plugin"))
                lazy = library in LAZY and top and not kernel and not _trains(path)
                if library in FORBIDDEN[room] - _allowed(room, top) or (lazy and room != "tools"):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} imports {module}")
    assert not wrong, "\n".join(wrong)


def _allowed(room: str, top: bool) -> set[str]:
    return {"torch"} if room == "builder" and not top else set()  # .bin files, where torch is installed


def _trains(path: Path) -> bool:
    return "train" in path.relative_to(ROOT).parts


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_packages_are_the_folders(project):
    found = [
        ".".join([name, *folder.relative_to(ROOT / room).parts])
        for room, name in ROOMS.items()
        for folder in [ROOT / room, *(path.parent for path in (ROOT / room).rglob("__init__.py"))]
    ]
    assert sorted(project["tool"]["setuptools"]["packages"]) == sorted(set(found))
    for room, name in ROOMS.items():
        assert project["tool"]["setuptools"]["package-dir"][name] == room


def test_data_files_are_packaged(project):
    """Every kind of data in the rooms matches a pattern that the wheel takes along."""
    patterns = project["tool"]["setuptools"]["package-data"]["*"]
    endings = {pattern.rsplit(".", 1)[-1] for pattern in patterns if pattern.startswith("**/")} | {"typed"}
    data = [
        path
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    ]
    assert not [str(path) for path in data if path.suffix.lstrip(".") not in endings]


def test_make_demo_needs_no_torch(project):
    base = " ".join(project["project"]["dependencies"])
    assert not any(heavy in base for heavy in ("torch", "transformers", "triton", "tensorrt"))


@pytest.mark.parametrize("room", [*ORDER, "tests"])
def test_sizes(room):
    """Files under 500 lines, no function over 60, nine in ten under 30 in the product's rooms."""
    long, lengths = [], []
    for path in files(room):
        text = path.read_text(encoding="utf-8")
        if len(text.splitlines()) >= 500:
            long.append(f"{path.relative_to(ROOT)}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                kernel = path.name == "kernel.py"  # an argument a line, and a body that shares its registers
                lengths.append(node.end_lineno - (node.body[0].lineno if kernel else node.lineno) + 1)
                if lengths[-1] > (70 if kernel else 60):
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {lengths[-1]} lines")
    assert not long, "\n".join(long)
    assert not lengths or sum(length < 30 for length in lengths) >= 0.9 * len(lengths)


# Written apart, so that this file does not hold what it forbids.
WORDS = ["/wo" + "rk/", "pypi" + ".org", "pythonho" + "sted.org", "TO" + "DO", "FIX" + "ME", "XX" + "X"]


def test_words_that_must_not_appear():
    """No path of one machine, no registry's host name, nothing left to do."""
    endings = {".py", ".md", ".toml", ".json", ".jsonl", ".yml", ".yaml", ""}
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in sorted(ROOT.rglob("*"))
        if path.is_file() and path.suffix in endings and path.name != "LICENSE" and path.stat().st_size < 1 << 20
        if not any(_skipped(part) for part in path.relative_to(ROOT).parts)
        for word in WORDS
        if word in path.read_text(encoding="utf-8", errors="ignore")
    ]
    assert not found, "\n".join(found)


def _skipped(part: str) -> bool:
    """Caches, environments and what a build leaves."""
    hidden = part.startswith(".") and part != ".ci"
    return hidden or part in {"__pycache__", "build", "dist"} or part.endswith((".bundle", ".egg-info"))
