"""Models on the Hugging Face Hub: `hf://user/name`, or `hf://user/name@revision`.

Only the safetensors file and its checksums are downloaded: nothing that comes from there can run code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from uniquery.errors import CheckpointError, UserError
from uniquery.weights.checksummed import CHECKSUMS_FILE

_REPOSITORY = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
_ADDRESS = re.compile(rf"hf:/{{1,2}}(?P<repository>{_REPOSITORY})(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_hub_address(path: str | Path) -> bool:
    """Whether it names a model on the Hub; `Path` makes one slash of two.

    >>> is_hub_address("hf://user/name"), is_hub_address(Path("hf://user/name")), is_hub_address("runs/hf")
    (True, True, False)
    """
    return str(path).startswith("hf:/")


def is_repository(name: str) -> bool:
    """Whether it has the form `user/name`."""
    return re.fullmatch(_REPOSITORY, name, re.ASCII) is not None


def download_model(address: str | Path, file: str) -> Path:
    """The model file of an address, from the cache or downloaded into it.

    What is in the cache is taken without asking the Hub. An address with a branch or a tag, such as
    `hf://user/name@main`, asks for its newest version, and takes the cache if the Hub cannot be reached.

    Args:
        address: `hf://user/name` or `hf://user/name@revision`.
        file: the name of the model file in the repository.

    Raises:
        CheckpointError: the address is wrong, or there is no such model.
        UserError: `huggingface_hub` is not installed.
    """
    match = _ADDRESS.fullmatch(str(address))
    if match is None:
        raise CheckpointError(f"{address} names no model: write hf://user/name or hf://user/name@revision.")
    repository, revision = match["repository"], match["revision"]
    name = f"hf://{repository}" + (f"@{revision}" if revision else "")
    is_moving = revision is not None and not _COMMIT.fullmatch(revision)
    folder = None if is_moving else _cached(repository, revision, file)
    if folder is None:
        with explain_hub_errors(name):
            folder = _download(repository, revision, file)
    if not (folder / file).is_file():
        raise CheckpointError(f"{name} has no {file}: it was not written by 'uniquery push'.")
    return folder / file


def _cached(repository: str, revision: str | None, file: str) -> Path | None:
    """The folder of a model that is completely in the cache."""
    try:
        folder = _download(repository, revision, file, local_files_only=True)
    except import_hub().errors.LocalEntryNotFoundError:
        return None
    return folder if (folder / file).is_file() else None


def _download(repository: str, revision: str | None, file: str, **options: Any) -> Path:
    names = [file, CHECKSUMS_FILE]
    return Path(import_hub().snapshot_download(repository, revision=revision, allow_patterns=names, **options))


def import_hub() -> Any:
    """The package `huggingface_hub`.

    Raises:
        UserError: it is not installed.
    """
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError:
        raise UserError(
            "The Hugging Face Hub needs the package huggingface_hub: pip install 'uniquery[hub]'."
        ) from None
    return huggingface_hub


@contextmanager
def explain_hub_errors(name: str) -> Iterator[None]:
    """Turns the errors of `huggingface_hub` into one sentence about a repository.

    Raises:
        CheckpointError: instead of them.
    """
    errors = import_hub().errors
    try:
        yield
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"There is no such revision: {name}.") from None
    except errors.GatedRepoError:
        raise CheckpointError(
            f"{name} is gated: ask for access on its page, then log in with 'hf auth login'."
        ) from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"There is no {name}, or it is private: check the name, or log in with 'hf auth login'."
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise CheckpointError(
            f"{name} is not in the cache, and the Hub cannot be reached: check the connection and HF_HUB_OFFLINE."
        ) from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        advice = " Log in with 'hf auth login', with a token that may write." if status in (401, 403) else ""
        raise CheckpointError(f"The Hub refused the request for {name}: {_first_line(error)}.{advice}") from None
    except Exception as error:
        # Errors of the connection are those of the HTTP library: httpx in huggingface_hub 1, httpx2 in version 2.
        if not isinstance(error, OSError) and not type(error).__module__.startswith("httpx"):
            raise
        raise CheckpointError(f"Cannot transfer {name}: {_first_line(error)}.") from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
