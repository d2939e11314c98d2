"""The block-streamed evaluation on a GPU: the numbers of the CPU within the noise floor, within the stated memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from q38.data import data_path
from q38.measure.evaluate import measure_quality

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


def test_it_gives_the_numbers_of_the_cpu(tiny_packed: Path, tiny_source: Path, tiny_ple: Path) -> None:
    text = str(data_path("assets", "text", "multilingual.jsonl"))
    options: dict[str, Any] = {"ple": tiny_ple, "text": text, "tokens": 512, "seqlen": 64}
    on_gpu, on_cpu = (
        measure_quality(tiny_packed, tiny_source, device=device, **options).to_dict()
        for device in ("cuda", "cpu")
    )
    assert 0 < on_gpu["memory"]["device_peak"] <= on_gpu["memory"]["device"]
    floor = max(part["floor"]["kl divergence"]["value"] for part in (on_gpu, on_cpu))
    ours, theirs = ({check["name"]: check["value"] for check in part["checks"]} for part in (on_gpu, on_cpu))
    assert ours["kl divergence"] == pytest.approx(theirs["kl divergence"], abs=3 * floor)
    assert ours["nll, source"] == pytest.approx(theirs["nll, source"], abs=1e-2)
    for a, b in zip(on_gpu["layers"], on_cpu["layers"], strict=True):
        assert a["relative_error"] == pytest.approx(b["relative_error"], rel=0.05)
