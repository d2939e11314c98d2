"""A repository on the Hugging Face hub, by metadata only: no weights are downloaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from q38.base.errors import InputError
from q38.checkpoint.header import TensorInfo
from q38.checkpoint.index import read_json
from q38.inspection.findings import Findings
from q38.inspection.opened import Opened, check_index, release_names
from q38.model.shape import ModelShape

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(source: str) -> bool:
    """`owner/name`, where no directory `owner` is here (then it is a mistyped path)."""
    return bool(_HUB_ID.fullmatch(source)) and not Path(source).parent.exists()


def open_hub(repo: str, findings: Findings, *, endpoint: str | None = None) -> Opened:
    """Open a repository through huggingface_hub: config.json, the index, and the header of each shard.

    Args:
        endpoint: address of another hub; default the one huggingface_hub is set to.

    Raises:
        InputError: no such repository, no network, or no safetensors in it.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    api = HfApi(endpoint=endpoint)
    info = _ask(repo, lambda: api.model_info(repo, files_metadata=True))
    files = {s.rfilename: int(s.size or 0) for s in info.siblings or [] if "/" not in s.rfilename}
    config_file = _ask(repo, lambda: api.hf_hub_download(repo, "config.json"))
    config = read_json(Path(config_file))
    shape = ModelShape.from_config(config, where=f"{repo}/config.json")
    metadata = _ask(repo, lambda: api.get_safetensors_metadata(repo))
    tensors: dict[str, TensorInfo] = {}
    for file, header in sorted(metadata.files_metadata.items()):
        for name, tensor in header.tensors.items():
            begin, end = tensor.data_offsets
            tensors.setdefault(
                name, TensorInfo(name, tensor.dtype, tuple(tensor.shape), Path(file), begin, end)
            )
    if metadata.sharded:
        check_index(metadata.weight_map, tensors, metadata.files_metadata.keys(), findings)

    def read_text(name: str) -> str | None:
        try:
            return Path(api.hf_hub_download(repo, name)).read_text(encoding="utf-8")
        except EntryNotFoundError:
            return None

    return Opened(repo, config, shape, release_names(tensors), files, read_text)


def _ask(repo: str, question: Any) -> Any:
    """Run one request; the client's and the network's failures become one line."""
    from huggingface_hub.errors import (
        NotASafetensorsRepoError,
        RepositoryNotFoundError,
        SafetensorsParsingError,
    )

    try:
        return question()
    except RepositoryNotFoundError:
        raise InputError(
            "no such directory here and no such repository on the hub", where=repo, remedy="check the name"
        ) from None
    except (NotASafetensorsRepoError, SafetensorsParsingError) as error:
        raise InputError(
            f"its safetensors headers cannot be read ({_one_line(error)})",
            where=repo,
            remedy="give a repository with safetensors files",
        ) from None
    except Exception as error:  # noqa: BLE001
        # The client's HTTP library, and with it the errors, changed from release to release.
        raise InputError(
            f"the hub cannot be read ({_one_line(error)})",
            where=repo,
            remedy="check the name and the network, or give a local directory",
        ) from None


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:150]
