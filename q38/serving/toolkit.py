"""The CUDA toolkit that SGLang compiles kernels with when it starts: nvcc, and the headers beside it."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from q38.base import settings

_DEFAULT = Path("/usr/local/cuda")
_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Toolkit:
    """compiler, headers: releases such as "13.0", None where there is none."""

    home: Path
    compiler: str | None
    headers: str | None

    @property
    def consistent(self) -> bool:
        """Both there, and of one release: nvcc refuses headers of another."""
        return self.compiler is not None and self.compiler == self.headers

    def __str__(self) -> str:
        return f"nvcc {self.compiler or 'absent'}, headers {self.headers or 'absent'} in {self.home}"


def find_toolkit() -> Toolkit:
    """The toolkit that SGLang would use: CUDA_HOME or CUDA_PATH, that of the nvcc on the PATH, /usr/local/cuda."""
    nvcc = shutil.which("nvcc")
    home = settings.cuda_home() or (Path(nvcc).resolve().parent.parent if nvcc else _DEFAULT)
    return Toolkit(home, _compiler(home / "bin" / "nvcc"), _headers(home))


def _compiler(nvcc: Path) -> str | None:
    try:
        told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release (\d+\.\d+)", told)
    return found[1] if found else None


def _headers(home: Path) -> str | None:
    for folder in ("include", "targets/x86_64-linux/include"):
        file = home / folder / "cuda_runtime_api.h"
        if file.is_file():
            found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", file.read_text(errors="replace"))
            if found:
                return f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}"
    return None
