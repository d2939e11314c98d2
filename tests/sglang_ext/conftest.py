"""What the tests of the extension share: a copy of SGLang's files, a child that has imported SGLang, one server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from q38.base.settings import child_env

if TYPE_CHECKING:
    from q38.serving.launch import Server

# Of what SGLang needs beyond q38's own extras: absent where it was installed without its dependencies.
_SAMPLE = ("orjson", "pybase64", "msgspec", "zmq", "uvloop", "xgrammar")


def missing() -> str | None:
    """Why SGLang cannot run here; None where it can. Imports nothing."""
    absent = [name for name in ("sglang", *_SAMPLE) if util.find_spec(name) is None]
    return f"no {', '.join(absent)}: run scripts/test.sh, which installs SGLang" if absent else None


@pytest.fixture(scope="session")
def sglang_tree() -> Path:
    """The tree of the installed SGLang. Read only."""
    if util.find_spec("sglang") is None:
        pytest.skip("no sglang: run scripts/test.sh, which installs SGLang")
    from q38.sglang_ext.source import installed_tree

    return installed_tree()


@pytest.fixture
def tree(sglang_tree: Path, tmp_path: Path) -> Path:
    """A copy of the files that the extension looks at, to be changed."""
    from q38.sglang_ext.source import module_file
    from q38.sglang_ext.targets import EDITED_FILES, all_targets

    copy = tmp_path / "tree"
    found = [place[0] for target in all_targets() if (place := module_file(sglang_tree, target))]
    others = [sglang_tree / name for name in (*EDITED_FILES, "sglang/_version.py")]
    for file in {*found, *others}:
        target = copy / file.relative_to(sglang_tree)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    return copy


class Child:
    """A process that has imported SGLang: tests must not import it here, since it changes transformers."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("sglang_child.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=child_env(
                {"SGLANG_PLATFORM": "q38cpu", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"},
                drop=("Q38_SGLANG",),
            ),
        )

    def run(self, code: str) -> Any:
        """What `code` assigns to `result`; RuntimeError with the type and the text of what it raises."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]


@pytest.fixture(scope="session")
def sglang_child() -> Iterator[Child]:
    """One such process for all tests, with every hook of the engine applied."""
    if why := missing():
        pytest.skip(why)
    child = Child()
    child.run(
        "from q38.sglang_ext.activate import activate\nhooks = activate(engine=True)\nresult = len(hooks)"
    )
    yield child
    assert child.process.stdin is not None
    child.process.stdin.close()
    child.process.wait(30)


@pytest.fixture(scope="module")  # its scheduler keeps a core busy as long as it lives
def sglang_server(tiny_packed: Path, tiny_ple: Path) -> Iterator[Server]:
    """The packed tiny model in the real SGLang engine on the CPU."""
    if why := missing():
        pytest.skip(why)
    from q38.serving.launch import running_server
    from q38.serving.sglang_settings import SglangSettings

    settings = SglangSettings(
        device="cpu", context=1024, requests=2, early_rows=True, early_scheduler=True, adapt=True
    )
    with running_server(
        tiny_packed, ple=tiny_ple, name="tiny", engine="sglang", api_key="sesame", sglang=settings
    ) as server:
        yield server
