"""Folders of derived data that appear whole or not at all, each named by a hash of what it was made from.

Nothing is locked. A folder is written aside and renamed; of several processes that make the same one at the same
moment the first to rename wins, and the others use its folder. A damaged folder is mended by renaming whole files
into it, which is safe at any moment because every process makes the same bytes.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from launcher.errors import RequestError

FORMAT = "okazaki genome cache 1"
META = "meta.json"
ASIDE = ".making-"
ABANDONED_S = 24 * 3600
"""A folder written aside that nobody has touched for so long was left by a process that was killed."""


@dataclass(frozen=True)
class Entry:
    """A whole folder of derived data; ``meta`` is what its maker noted about it."""

    path: Path
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class Store:
    """Where entries are looked for (in all of ``roots``) and made (in the first of them that can be written).

    With ``keep=False`` new entries go to a folder that is removed when the process ends.
    """

    roots: Sequence[Path]
    keep: bool

    @property
    def exists(self) -> bool:
        """Whether anything can be found: without any entry there is no need to work out a name."""
        return any(root.exists() for root in self._all_roots)

    @property
    def _all_roots(self) -> Sequence[Path]:
        was_made = not self.keep and temporary_root.cache_info().currsize
        return [*self.roots, temporary_root()] if was_made else self.roots

    def find(self, name: str) -> Entry | None:
        """The entry of that name, if there is a whole one."""
        for root in self._all_roots:
            entry = read(root / name)
            if entry is not None:
                return entry
        return None

    def make(self, write: Callable[[Path], tuple[str, Mapping[str, Any]]]) -> Entry:
        """The entry that ``write`` makes: it fills the empty folder it is given, and returns (name, meta).

        Raises RequestError if no folder can be written, and what ``write`` raises; nothing is left behind then.
        """
        with self._aside() as folder:
            name, meta = write(folder)
            return _install(folder, folder.parent / name, meta)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[Path]:
        """A new folder beside the entries; what is left of it, and the folders made for it, go at the end."""
        refusals = []
        if not self.keep and not any(_can_be_written(root) for root in self.roots):
            raise _refusal([str(root) for root in self.roots])
        for root in self.roots if self.keep else [temporary_root()]:
            made = [folder for folder in (root, *root.parents) if not folder.exists()]
            folder = root / f"{ASIDE}{os.getpid()}-{os.urandom(4).hex()}"
            try:
                folder.mkdir(parents=True)
                _remove_abandoned(root)
            except OSError as error:
                refusals.append(f"{root} ({error.strerror})")
                _remove_empty(made)
                continue
            try:
                yield folder
            except OSError as error:
                raise RequestError(
                    f"data.cache_dir: the genome cannot be written to {root}: {error.strerror}; "
                    "set it to a folder with room for one byte a base"
                ) from None
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                _remove_empty(made)
            return
        raise _refusal(refusals)


def roots(cache_dir: str | None, genome: Path) -> list[Path]:
    """``data.cache_dir``; or else beside the genome (a file, or an entry itself), and then the user's cache folder."""
    if cache_dir is not None:
        return [Path(os.path.expandvars(cache_dir))]
    beside = genome.parent if genome.is_dir() else genome.with_name(f"{genome.name}.okazaki")
    users = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return [beside, Path(users).expanduser() / "okazaki"]


def read(path: Path) -> Entry | None:
    """The entry in a folder; None if it is not there, of another format, or not whole."""
    try:
        meta = json.loads((path / META).read_bytes())
        if meta["format"] == FORMAT and all(
            (path / file).stat().st_size == size for file, size in meta["files"].items()
        ):
            return Entry(path, meta)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return None


@cache
def temporary_root() -> Path:
    """A folder that is removed when this process ends."""
    import atexit
    import tempfile

    root, owner = Path(tempfile.mkdtemp(prefix="okazaki-")), os.getpid()

    def remove() -> None:
        # A forked child has inherited this and leaves the folder to its parent.
        if os.getpid() == owner:
            shutil.rmtree(root, ignore_errors=True)

    atexit.register(remove)
    return root


def _install(folder: Path, place: Path, meta: Mapping[str, Any]) -> Entry:
    files = sorted(file for file in folder.iterdir())
    whole = {"format": FORMAT, "files": {file.name: file.stat().st_size for file in files}, **meta}
    (folder / META).write_text(json.dumps(whole), encoding="utf-8")
    for path in [*files, folder / META, folder]:
        _sync(path)
    try:
        folder.rename(place)
    except OSError:
        entry = read(place)
        if entry is not None:
            return entry
        if not place.is_dir():
            raise
        for path in [*files, folder / META]:
            path.replace(place / path.name)
    _sync(place.parent)
    return Entry(place, whole)


def _refusal(folders: Sequence[str]) -> RequestError:
    return RequestError(
        f"data.cache_dir: the genome cannot be cached in {' or '.join(folders)}; set it to a folder that can be written"
    )


def _can_be_written(folder: Path) -> bool:
    """Whether a folder can be made, as far as can be told without trying."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(root: Path) -> None:
    for folder in root.glob(f"{ASIDE}*"):
        with contextlib.suppress(OSError):  # another process removes it too
            if time.time() - max(path.stat().st_mtime for path in [folder, *folder.iterdir()]) > ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove what was made for nothing; ``folders`` from the innermost outwards."""
    with contextlib.suppress(OSError):  # not empty: it is in use
        for folder in folders:
            folder.rmdir()
