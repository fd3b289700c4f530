"""Repositories of models on a Hugging Face hub, named hf://OWNER/NAME or hf://OWNER/NAME@REVISION.

The client reads HF_TOKEN and HF_ENDPOINT from the environment, as always.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from geotrain.config import ConfigError

SCHEME = "hf://"
WANTED = "*.json", "*.safetensors"  # of a checkpoint


class HubError(OSError):
    """Raised when a hub does not do what it is asked for. Says why, and what to do."""


def repository(url: str) -> tuple[str, str | None]:
    """Read (OWNER/NAME, revision) from an URL. Raises ConfigError."""
    found = re.fullmatch(rf"{SCHEME}([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", url)
    if found is None:
        raise ConfigError(f"{url}: is no repository of a hub; write {SCHEME}OWNER/NAME, or with @REVISION behind")
    return found[1], found[2]


def download(url: str) -> Path:
    """Fetch a checkpoint into the client's cache; returns its folder. Raises ConfigError, HubError."""
    name, revision = repository(url)
    with _errors(url):
        from huggingface_hub import snapshot_download  # takes long to import

        return Path(snapshot_download(name, revision=revision, allow_patterns=list(WANTED)))


def upload(folder: Path, url: str, message: str) -> str:
    """Upload a folder as one commit, into a repository that is made, private, if it is not there; returns the
    commit's address. Raises ConfigError, HubError."""
    name, revision = repository(url)
    with _errors(url):
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        done = api.upload_folder(
            repo_id=name, folder_path=folder, revision=revision, commit_message=message, ignore_patterns=".*"
        )
        return str(done.commit_url)


@contextmanager
def _errors(url: str) -> Iterator[None]:
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise HubError(
            f"{url}: {reason}; see that the repository is there, and that HF_TOKEN lets one use it (another hub: "
            "HF_ENDPOINT)"
        ) from None
