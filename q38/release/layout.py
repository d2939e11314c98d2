"""What lies where in a release, and what the hub asks of the files.

config.json, *.safetensors, tokenizer ...   the model, as its last step wrote it, MANIFEST.json included
ple/             the n-gram table
q38/             what q38's own verbs take: recipe, routing profile, oracle reference
records/         measurements and history: reports, the document of each step, earlier manifests
README.md        the model card
SHA256SUMS       for `sha256sum -c`
RELEASE.json     the seal: every other file with bytes and hashes, and where it all comes from
"""

from __future__ import annotations

import os
from pathlib import Path

RELEASE = "RELEASE.json"
SUMS = "SHA256SUMS"
CARD = "README.md"
ATTRIBUTES = ".gitattributes"
PLE = "ple"
TOOLS = "q38"
RECORDS = "records"

# https://huggingface.co/docs/hub/storage-limits: below 200 GB recommended, 500 GB at most.
LARGE_FILE = 200 * 10**9
MAX_FILE = 500 * 10**9
# So that a clone and a download have the file that the hub would otherwise add by itself.
ATTRIBUTES_TEXT = "".join(
    f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in ("*.bin", "*.safetensors")
)
# What git and the hub's client put into a directory that they fill.
FOREIGN = (".git", ".cache/huggingface")


def files_below(root: Path) -> dict[str, Path]:
    """Name relative to `root`, with slashes -> path, of every file, link and special file; `FOREIGN` left out.

    A link to a directory counts as one entry and is not followed.
    """
    found: dict[str, Path] = {}
    for directory, folders, files in os.walk(root):
        here = Path(directory)
        for name in list(folders):
            path = here / name
            if path.relative_to(root).as_posix() in FOREIGN:
                folders.remove(name)
            elif path.is_symlink():
                found[path.relative_to(root).as_posix()] = path
        found |= {(here / name).relative_to(root).as_posix(): here / name for name in files}
    return dict(sorted(found.items()))
