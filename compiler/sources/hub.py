"""Models on the Hugging Face hub, through its own client and cache (HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN)."""

from __future__ import annotations

from pathlib import Path

from adaptc.errors import NotFoundError
from adaptc.sources.huggingface import PATTERNS


def local_snapshot(repository: str) -> Path:
    """The folder that holds ``repository``'s files, downloaded if need be. InputError when there is no way to it."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, allow_patterns=list(PATTERNS)))
    except LocalEntryNotFoundError as error:
        where = "the hub is switched off (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "the hub can't be reached"
        raise NotFoundError(
            f"{repository} is not in the local cache ({constants.HF_HUB_CACHE}), and {where}.",
            hint="Download it where there is a network and pass the folder, or set HF_HOME or HF_ENDPOINT.",
        ) from error
    except HFValidationError as error:
        raise NotFoundError(f"{repository!r} is no hub id: {error}") from error
    except (HfHubHTTPError, OSError) as error:
        raise NotFoundError(
            f"{repository} can't be read from the hub: {str(error).splitlines()[0]}",
            hint="Check the name; gated models need HF_TOKEN.",
        ) from error
