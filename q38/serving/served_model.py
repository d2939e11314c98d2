"""transformers' model manager, reduced to one model that q38 loads."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import get_response_template

from q38.base.memory import available_memory
from q38.base.units import format_bytes
from q38.checkpoint.index import Checkpoint
from q38.hf.load import load_model, load_tokenizer
from q38.hf.unpack import unpacked_bytes

_LOG = logging.getLogger(__name__)
_REASONING = "<think>"


class ServedModel(ModelManager):  # type: ignore[misc]
    """Loads the model when it is made, and keeps it.

    name: its id in /v1/models.
    context: tokens that prompt and answer may have together.
    """

    def __init__(self, path: Path, *, ple: Path | None, name: str) -> None:
        self.path, self.ple, self.name = path, ple, name
        self.created = int(time.time())
        super().__init__(device="cpu", dtype="bfloat16", force_model=name)
        model, _ = self.get()
        self.context: int = model.config.get_text_config().max_position_embeddings

    def get(self) -> tuple[Any, Any]:
        """(model, tokenizer)."""
        result: tuple[Any, Any] = self.load_model_and_processor(self.process_model_name(self.name))
        return result

    def get_gen_models(self) -> list[dict[str, Any]]:
        """The entry of /v1/models; `max_model_len` as SGLang and vLLM name it."""
        entry = {"id": self.name, "object": "model", "created": self.created, "owned_by": "q38"}
        return [{**entry, "max_model_len": self.context}]

    def _load_processor(self, model_id_and_revision: str, gguf_file: str | None = None) -> Any:
        # A tokenizer and not a processor: the handlers then treat the model as text only.
        tokenizer = load_tokenizer(self.path)
        if tokenizer.response_template is None and _REASONING in tokenizer.get_vocab():
            # Qwen4-Exp's template writes reasoning and tool calls as Qwen3.5's does; transformers 5.19 knows that one.
            qwen = SimpleNamespace(config=SimpleNamespace(model_type="qwen3_5"))
            tokenizer.response_template = get_response_template(tokenizer, qwen)
        return tokenizer

    def _load_model(self, model_id_and_revision: str, **_options: Any) -> Any:
        model = load_model(self.path, ple=self.ple, dtype=compute_dtype(self.path), device="cpu")
        if (self.path / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(self.path)
        return model


def compute_dtype(path: Path) -> torch.dtype:
    """What a CPU computes in: bf16, or float32 where it has no bf16 units and the model is packed and small.

    float32 unpacks the matrices; small is what then fits in a quarter of the memory that is free.
    """
    units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    unpacked = unpacked_bytes(Checkpoint.open(path), torch.float32.itemsize)
    if units or not 0 < unpacked <= available_memory() // 4:
        return torch.bfloat16
    _LOG.warning("this CPU has no bf16 units: weights unpacked to float32, %s", format_bytes(unpacked))
    return torch.float32
