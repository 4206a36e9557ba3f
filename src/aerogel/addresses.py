"""Files behind an address (`s3://bucket/path`, or any of fsspec's) or a plain path."""

from __future__ import annotations

from typing import Any

from aerogel.errors import InvalidArgument, printable
from aerogel.optional import install


def filesystem(url: str, **s3: Any) -> tuple[Any, str]:
    """fsspec's own, and the path there. Listings are not remembered: other machines write too. `s3` are
    further settings of S3's."""
    import fsspec

    scheme, found, _ = url.partition("://")
    more = {**s3, "use_listings_cache": False} if found and scheme in ("s3", "s3a") else {}
    try:
        fs, path = fsspec.core.url_to_fs(url, **more)
    except (ImportError, ValueError) as why:
        raise InvalidArgument(
            f"'{printable(url)[:80]}' cannot be opened: {printable(why)[:200]} (s3:// needs {install('s3')})"
        ) from None
    return fs, path


def is_local(fs: Any) -> bool:
    """Whether it is this machine's own."""
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)
