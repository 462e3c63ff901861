"""Bundles exist whole or not at all, the same bytes twice, wherever they are moved."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbuild.compile import compile_bundle
from specrun.bundle import Bundle
from specrun.errors import CompileError
from tests.builder.engines import BareEngine
from tests.builder.tiny import write_tiny_checkpoint

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork and renameat2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return tuple(write_tiny_checkpoint(root / str(seed), "llama", seed=seed, hidden=32) for seed in (0, 1))  # type: ignore


def digests(bundle: Bundle) -> dict[str, str]:
    return {record.path: record.sha256 for record in bundle.manifest.files}


def in_child(work: Callable[[], Any]) -> int:
    """Runs ``work`` in a fork; the wait status."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def test_twice_the_same_bytes(models: tuple[Path, Path], tmp_path: Path) -> None:
    for quantize in (None, "int4"):
        outputs = [tmp_path / f"{name}-{quantize}.bundle" for name in "ab"]
        for output in outputs:
            compile_bundle(models[0], output, quantize=quantize)
        first, second = ({p.name: p.read_bytes() for p in output.iterdir()} for output in outputs)
        assert first == second


def test_nothing_but_the_bundle_is_left_and_it_holds_no_paths(models: tuple[Path, Path], tmp_path: Path) -> None:
    bundle = compile_bundle(models[0], tmp_path / "out.bundle")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.bundle"]
    listed = {record.path for record in bundle.manifest.files} | {"bundle.json"}
    assert {p.name for p in bundle.path.iterdir()} == listed
    for file in bundle.path.iterdir():
        assert str(tmp_path).encode() not in file.read_bytes()


def kill_after(calls: int, model: Path, output: Path) -> int:
    """Compiles in a child that kills itself (as kill -9 would) at its ``calls``-th function call; the wait status."""

    def work() -> None:
        left = calls

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
        compile_bundle(model, output)
        sys.setprofile(None)

    return in_child(work)


def count_calls(model: Path, output: Path) -> int:
    total = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal total
        total += 1

    sys.setprofile(count)
    compile_bundle(model, output)
    sys.setprofile(None)
    return total


@linux
def test_killed_at_many_points(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Absent or whole where there was nothing; the old or the new one, whole, where there was a bundle."""
    new = digests(compile_bundle(models[1], tmp_path / "new.bundle"))
    fresh, replaced = tmp_path / "fresh.bundle", tmp_path / "replaced.bundle"
    old = digests(compile_bundle(models[0], replaced))
    assert old != new
    total = count_calls(models[1], tmp_path / "new.bundle")
    early = [int(total * share) for share in (0.05, 0.3, 0.6, 0.9, 0.97)]
    for calls in [*early, *range(total - 105, total, 15)]:
        assert os.WIFSIGNALED(kill_after(calls, models[1], fresh))
        if fresh.exists():
            assert digests(Bundle.open(fresh)) == new
        assert os.WIFSIGNALED(kill_after(calls, models[1], replaced))
        assert digests(Bundle.open(replaced)) in (old, new)
    compile_bundle(models[1], fresh)
    compile_bundle(models[1], replaced)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fresh.bundle", "new.bundle", "replaced.bundle"]


@linux
def test_a_running_compile_is_not_a_leftover(models: tuple[Path, Path], tmp_path: Path) -> None:
    from specbuild.bundle_writer import staged

    output = tmp_path / "out.bundle"
    with staged(output) as other:
        compile_bundle(models[0], output)
        assert other.is_dir()
    assert [p.name for p in tmp_path.iterdir()] == ["out.bundle"]


@linux
def test_full_disk(models: tuple[Path, Path], tmp_path: Path) -> None:
    """A write that the system refuses: one error, nothing left, the old bundle untouched."""
    output = tmp_path / "out.bundle"
    old = digests(compile_bundle(models[0], output))

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        with pytest.raises(CompileError, match="could not be written"):
            compile_bundle(models[1], output)

    assert in_child(work) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["out.bundle"]
    assert digests(Bundle.open(output)) == old


def test_what_is_not_a_bundle_is_not_replaced(models: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CompileError, match="not a bundle"):
        compile_bundle(models[0], tmp_path)
    with pytest.raises(CompileError, match="is a file"):
        compile_bundle(models[0], tmp_path / "notes.txt")
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    assert compile_bundle(models[0], tmp_path / "empty").path == tmp_path / "empty"


def test_runs_from_anywhere(models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F03: another working directory, a relative path, a link, after a move, from read-only files."""
    compile_bundle(models[0], tmp_path / "first.bundle")
    os.rename(tmp_path / "first.bundle", tmp_path / "moved.bundle")
    os.symlink(tmp_path / "moved.bundle", tmp_path / "link.bundle")
    for file in (tmp_path / "moved.bundle").iterdir():
        file.chmod(0o444)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for path in ("../moved.bundle", "../link.bundle", tmp_path / "link.bundle"):
        assert BareEngine(Bundle.open(path)).prefill([[5, 6, 7]])["logits"].shape == (1, 3, 512)
