"""Other spellings of the catalogue's devices: as clouds, vendors and tables write them.

    H200-SXM-141GB   ->  h200
    v100-sxm2-32gb   ->  v100-32gb
    NVIDIA RTX 4090  ->  rtx-4090
    a100             ->  none: 40 or 80 GB, on which board?

A spelling is a device's where it has all words of the catalogue's name, and besides them only words of its maker, of
how it is built in, and of its memory; and where that is so of one device alone.
"""

import re

from cost_models import catalog
from cost_models.errors import ClusterError

_MAKERS = frozenset(
    {"nvidia", "amd", "tesla", "geforce", "instinct", "gpu", "tensor", "core", "gcd", "rtx", "quadro"}
    | {"volta", "turing", "ampere", "hopper", "blackwell", "server", "workstation", "edition"}
)
_BOARDS = frozenset({"sxm", "hgx", "dgx", "oam", "nvl72", "nvl36"})
"""Ways of building in that most devices have but one of; PCIe boards are devices of their own."""

_SOCKET = re.compile(r"sxm\d")
_MEMORY = re.compile(r"(\d+)gb")
_MEMORY_TOLERANCE = 0.1
"""Sizes are given in 10**9 and in 2**30 bytes, with and without what error correction takes."""


def catalogued_name(text: str) -> str:
    """Return the catalogue's name of the device that a text names.

    Raises `ClusterError` with the closest name where the text is no device's, or that of several.
    """
    if text in catalog.names("devices"):
        return text
    said = _words(text)
    said |= {"sxm" for word in said if _SOCKET.fullmatch(word)}
    found = [name for name in catalog.names("devices") if _names(said, name)]
    most = max((len(_words(name)) for name in found), default=0)
    best = [name for name in found if len(_words(name)) == most]
    if len(best) > 1:
        raise ClusterError(f"device {text!r} may be {' or '.join(best)}: write one of these")
    if not best:
        raise catalog.unknown_entry("devices", text)
    return best[0]


def series_of(text: str) -> str:
    """Return the letters before the number of a device's name (`mi350x`: `mi`); empty where it has none.

    Cards' names have them apart (`RTX 3090 Ti`), and makers' names before them.
    """
    words = [word for word in re.split(r"[ _/-]+", text.lower()) if word not in _MAKERS or word == "rtx"]
    found = re.match(r"([a-z]+)(?=\d|$)", words[0]) if words else None
    return found[1] if found and (found.end() < len(words[0]) or words[1:2]) else ""


def _words(text: str) -> frozenset[str]:
    # Modules of 120, 240 and 480 GB are named by their hosts' memory; their device has 96 GB.
    text = re.sub(r"gh200[ _-]*(120|240|480) ?gb", "gh200 96gb", text.lower())
    spaced = re.sub(r"\b(rtx|mi|gh|gb|tpu)[ _-]+(?=\d)", r"\1", text)
    words = re.split(r"[ _/-]+", re.sub(r"(?<![a-z\d])(\d+) ?g(i?b)?\b", r"\1gb", spaced))
    return frozenset(word for word in words if word and not re.fullmatch(r"hbm\d?e?", word))


def _names(said: frozenset[str], name: str) -> bool:
    """Return whether words name the device: all of its own, and none that another would have."""
    own = _words(name)
    missing, more = own - said, said - own - _MAKERS - _BOARDS
    if missing:
        return False
    more = frozenset(word for word in more if not _SOCKET.fullmatch(word))
    sizes = [int(size[1]) for word in more if (size := _MEMORY.fullmatch(word))]
    if len(sizes) != len(more):
        return False
    capacity = catalog.number(catalog.entry("devices", name), "memory_capacity")
    return all(min(abs(size * unit / capacity - 1) for unit in (1e9, 2**30)) <= _MEMORY_TOLERANCE for size in sizes)
