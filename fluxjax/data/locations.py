"""Files by local path or by URL (fsspec).

A path that begins with `scheme://` is a URL, `file://` URLs are local paths. All failures are OSErrors of one line.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import os
import pathlib
import posixpath
import re
from collections.abc import Iterator
from typing import Any

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_LOCAL = re.compile("(file|local)://")
# Fields of `fs.info` that tell versions apart, the surest first. S3, Google, Azure, HTTP, the Hugging Face hub, memory
# and archives use different names.
_CONTENT = ("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "Digest", "blob_id", "CRC", "crc32c")
_TIME = ("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "created", "date_time")


def is_url(path: str) -> bool:
    return bool(_URL.match(path)) and not _LOCAL.match(path)


def local(path: str) -> str:
    """Returns the path without the scheme of local files."""
    scheme = _LOCAL.match(path)
    return path[scheme.end() :] if scheme else path


def suffix(path: str) -> str:
    """Returns the ending of a file's name, such as `.jsonl`."""
    return posixpath.splitext(_plain(path))[1]


def stem(path: str) -> str:
    return posixpath.splitext(posixpath.basename(_plain(path)))[0]


def _plain(path: str) -> str:
    """Returns a URL without its query and without its archive (`::`). A local path stays as it is."""
    return path.partition("::")[0].partition("?")[0] if is_url(path) else path


def joined(folder: str, path: str) -> str:
    """Returns `path` within `folder`, or `path` itself if `path` is absolute or a URL."""
    path = local(path)
    if is_url(path):
        return path
    if not is_url(folder) or path.startswith("/"):
        return str(pathlib.Path(folder) / path)
    head, chained, archives = folder.partition("::")
    scheme = _URL.match(head)
    assert scheme is not None
    return head[: scheme.end()] + posixpath.normpath(posixpath.join(head[scheme.end() :], path)) + chained + archives


def parent(path: str) -> str:
    if not is_url(path):
        return os.path.dirname(path) or os.curdir
    head, chained, archives = path.partition("::")
    scheme = _URL.match(head)
    assert scheme is not None
    folder = posixpath.dirname(head[scheme.end() :].partition("?")[0])
    return head[: scheme.end()] + folder + chained + archives


def filesystem(url: str) -> tuple[Any, str]:
    """Returns the fsspec file system of a URL, and the URL's path in that file system. Raises OSError."""
    with reaching(url):
        from fsspec.core import url_to_fs  # the import takes a tenth of a second

        return url_to_fs(url)


def _asked(method: str, url: str) -> Any:
    system, place = filesystem(url)
    with reaching(url):
        return getattr(system, method)(place)


@contextlib.contextmanager
def reaching(url: str) -> Iterator[None]:
    """Turns an error of a file system, except for MemoryError, into an OSError of one line."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError("no such file") from None
    except MemoryError:
        raise
    except ImportError as error:
        from fsspec.registry import known_implementations

        module = known_implementations.get(url.partition("://")[0], {}).get("class", "").partition(".")[0]
        hint = f" (pip install {module})" if module not in ("", "fsspec") else ""
        raise OSError(f"{error}{hint}") from error
    except Exception as error:  # each file system has errors of its own
        text = " ".join(str(error).split()) or type(error).__name__
        raise OSError(text) from error


def read(path: str) -> bytes:
    """Returns the content of a file. Raises OSError."""
    return _asked("cat_file", path) if is_url(path) else pathlib.Path(path).read_bytes()


def opened(path: str) -> io.BufferedIOBase:
    """Returns a file open for reading; the file of a URL is read completely first. Raises OSError."""
    return io.BytesIO(read(path)) if is_url(path) else open(path, "rb")


def stamp_of(path: str) -> str:
    """Returns the version of a local file: its size and the time of its last change. Raises OSError."""
    try:
        status = os.stat(path)
    except ValueError as error:  # a null, or half of a surrogate pair
        raise OSError(f"is no name of a file: {error}") from None
    return f"{status.st_size}-{status.st_mtime_ns}"


def version_of(path: str) -> str:
    """Returns the version of a file: its size, and a version name or a time of change. Files of equal size have equal
    versions if their server reports no version name and no time. Raises OSError."""
    if not is_url(path):
        return stamp_of(path)
    info = _asked("info", path)
    marks = next(([str(info[key])] for key in (*_CONTENT, *_TIME) if info.get(key) is not None), [])
    return "-".join([str(info.get("size")), *(hashlib.sha256(mark.encode()).hexdigest()[:16] for mark in marks)])


def why(error: OSError) -> str:
    """Returns the text of an OSError, in one line, without the name of the file."""
    return error.strerror or str(error)


def exists(path: str) -> bool:
    """Says whether there is a file or folder at a path. Raises OSError if a URL can't be reached."""
    return _asked("exists", path) if is_url(path) else os.path.exists(path)


def is_folder(path: str) -> bool:
    """Says whether a path is a folder. Raises OSError if a URL can't be reached."""
    return _asked("isdir", path) if is_url(path) else os.path.isdir(path)


def matching(folder: str, pattern: str) -> list[str]:
    """Returns the sorted paths below a folder that match a pattern with `*` (`**`: any folders). Raises OSError."""
    if not is_url(folder):
        return sorted(glob.glob(pattern, root_dir=folder, recursive=True))
    system, place = filesystem(folder)
    with reaching(folder):
        begin = place.rstrip("/") + "/"
        names = sorted(name.removeprefix(begin) for name in system.glob(begin + pattern))
        system.invalidate_cache()  # otherwise later calls of `info` would be answered from this listing
    return names
