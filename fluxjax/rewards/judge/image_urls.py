"""The images of a prompt as a chat server takes them: data URLs of their files, as they are."""

from __future__ import annotations

import asyncio
import base64
import mimetypes
import pathlib

from ...base.medium import Media, MediaKind
from ...base.scored import Prompt
from ..answers import Failing, RewardFailure

_MOST_BYTES = 20 << 20  # of a file; OpenAI takes no larger ones
_BEGINNINGS = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}


async def image_urls(prompt: Prompt) -> tuple[str, ...]:
    """Returns a URL for each image. Raises RewardFailure for a video, an image inside a parquet file, and a file that
    can't be read or has more than 20 MiB."""
    return tuple([await asyncio.to_thread(_url, media) for media in prompt.media])


def _url(media: Media) -> str:
    if media.kind is not MediaKind.IMAGE or media.cell:
        what = "a video" if media.kind is not MediaKind.IMAGE else "inside a parquet file"
        raise RewardFailure(Failing.RAISED, f"judge.images shows images that are files, but one medium is {what}")
    if media.data is None and media.path.startswith(("http://", "https://", "data:")):
        return media.path
    try:
        raw = media.data
        if raw is None:
            with pathlib.Path(media.path).open("rb") as file:
                raw = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise RewardFailure(Failing.RAISED, f"judge.images: {media.name}: {error.strerror or error}") from None
    if len(raw) > _MOST_BYTES:
        raise RewardFailure(Failing.RAISED, f"judge.images: {media.name} has more than {_MOST_BYTES} bytes")
    known = (kind for beginning, kind in _BEGINNINGS.items() if raw.startswith(beginning))
    kind = next(known, None) or mimetypes.guess_type(media.path)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"
