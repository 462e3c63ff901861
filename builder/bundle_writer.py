"""Writing a bundle: whole or not at all.

Everything goes into a temporary directory beside the destination; it is verified as a reader would, then renamed. A
bundle that was there before is exchanged for the new one in a single step where the system can (Linux), so a reader
finds one of the two at every moment. A killed compile leaves at most a temporary directory, which the next one to the
same destination removes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from specrun.bundle import MANIFEST_NAME, Bundle, FileRecord, Manifest, sha256_of
from specrun.errors import CompileError

try:
    import fcntl
except ImportError:  # not on Windows, where leftovers of a killed compile stay until removed by hand
    fcntl = None  # type: ignore[assignment]

_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
# None: numpy's short write, which names no cause.
_UNWRITABLE = (None, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS)


@contextlib.contextmanager
def staged(destination: Path) -> Iterator[Path]:
    """A temporary directory that becomes ``destination`` through ``publish``; removed however the block ends.

    Raises CompileError when the destination cannot be written or is something other than a bundle, and turns a full
    disk inside the block into one.
    """
    destination = destination.absolute()
    _refuse_foreign(destination)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(destination)
        directory = Path(tempfile.mkdtemp(prefix=_prefix(destination), dir=destination.parent))
    except OSError as error:
        raise _write_error(destination, error) from error
    lock = _lock(directory)
    try:
        yield directory
    except OSError as error:
        if error.errno in _UNWRITABLE:
            raise _write_error(destination, error) from error
        raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def finish(directory: Path, manifest: Callable[[tuple[FileRecord, ...]], Manifest]) -> Bundle:
    """Hashes every file of ``directory``, writes the manifest and opens the result as a reader would."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != LOCK_NAME)
    records = tuple(
        FileRecord(path.relative_to(directory).as_posix(), sha256_of(path), path.stat().st_size) for path in paths
    )
    (directory / MANIFEST_NAME).write_text(manifest(records).to_json(), encoding="utf-8")
    for path in [*paths, directory / MANIFEST_NAME]:
        _sync(path)
    return Bundle.open(directory, verify=False)


def publish(directory: Path, destination: Path) -> None:
    """Makes the staged ``directory`` the ``destination``. What was there before is gone when this returns."""
    destination = destination.absolute()
    os.chmod(directory, 0o777 & ~_umask())
    (directory / LOCK_NAME).unlink(missing_ok=True)
    if not destination.exists():
        os.rename(directory, destination)
    elif not _exchange(directory, destination):
        # No single step exists here: for a moment the destination is absent, never half-written.
        old = Path(tempfile.mkdtemp(prefix=_prefix(destination), dir=destination.parent))
        os.rename(destination, old / "old")
        os.rename(directory, destination)
        shutil.rmtree(old)
    _sync(destination.parent)


LOCK_NAME = ".lock"


def _prefix(destination: Path) -> str:
    return f".{destination.name}.tmp-"


def _refuse_foreign(destination: Path) -> None:
    if destination.is_symlink() and not destination.exists():
        raise CompileError(
            f"{destination}: is a link to something that is not there. Remove it or choose another path."
        )
    if not destination.exists():
        return
    if not destination.is_dir():
        raise CompileError(f"{destination}: is a file, expected a bundle or nothing. Choose another output path.")
    if any(destination.iterdir()) and not (destination / MANIFEST_NAME).is_file():
        raise CompileError(
            f"{destination}: is a directory but not a bundle (no {MANIFEST_NAME} in it), so it is not replaced. "
            "Choose another output path, or remove it yourself."
        )


def _remove_leftovers(destination: Path) -> None:
    """Removes temporary directories whose compile is gone: their lock is free."""
    for path in destination.parent.glob(f"{_prefix(destination)}*"):
        lock = _lock(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _lock(directory: Path) -> int | None:
    """An exclusive lock that the system drops when the process ends; None where it is held or there are no locks."""
    if fcntl is None:
        return None
    handle = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two paths in one step; False where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if renameat2 is None:
        return False
    here = -100  # AT_FDCWD
    result = renameat2(here, os.fsencode(a), here, os.fsencode(b), _EXCHANGE)
    if result != 0 and ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(b))
    return bool(result == 0)


def _sync(path: Path) -> None:
    """Forces a file or directory to the disk: a rename must not outlive what it names."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _write_error(destination: Path, error: OSError) -> CompileError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    return CompileError(
        f"{destination}: the bundle could not be written ({reason}), and nothing was left behind. "
        "Free space or choose another place with -o."
    )
