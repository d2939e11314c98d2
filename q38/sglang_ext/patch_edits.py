"""The few changes to SGLang that can live in its tree instead of the plugin: text replaced in three files.

For people who want no hooks on these functions. The 2-bit method and the rows still come from q38, and the plugin
still brings what is not here.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from q38.base.errors import CheckFailed
from q38.sglang_ext.targets import EDITED_FILES

AUTO_ROUND, SERVER_ARGS, BREAKABLE = EDITED_FILES


@dataclass(frozen=True)
class Edit:
    """One replacement. `before` occurs exactly once in the file of every release with a manifest."""

    file: str
    mechanism: str
    before: str
    after: str


EDITS = (
    Edit(
        AUTO_ROUND,
        "packed-modules",
        """        return cls(
            weight_bits=cls.get_from_keys(config, ["bits"]),
""",
        """        quant_config = cls(
            weight_bits=cls.get_from_keys(config, ["bits"]),
""",
    ),
    Edit(
        AUTO_ROUND,
        "packed-modules",
        """            gptq_defaulted_config_keys=gptq_defaulted_config_keys,
        )

    def get_scaled_act_names""",
        """            gptq_defaulted_config_keys=gptq_defaulted_config_keys,
        )
        quant_config.update_packed_modules_mapping(
            config.get("packed_modules_mapping") or {}
        )
        return quant_config

    def get_scaled_act_names""",
    ),
    Edit(
        AUTO_ROUND,
        "experts-2bit",
        """    def get_quant_method(self, layer: torch.nn.Module, prefix: str):
""",
        """    def get_quant_method(self, layer: torch.nn.Module, prefix: str):
        from q38.sglang_ext.quant_method import choose

        method = choose(self, layer, prefix)
        if method is not None:
            return method
""",
    ),
    Edit(
        SERVER_ARGS,
        "language-model-only",
        """    LANGUAGE_MODEL_ONLY_ARCHITECTURES = (
""",
        """    LANGUAGE_MODEL_ONLY_ARCHITECTURES = (
        "Qwen4ExpForConditionalGeneration",
""",
    ),
    Edit(
        BREAKABLE,
        "graph-output",
        """    def _output_rows(self, output: Any, cap: int) -> int:
""",
        """    @staticmethod
    def _logits_tensors(output: Any) -> dict:
        from dataclasses import fields

        values = {f.name: getattr(output, f.name) for f in fields(output) if f.init}
        return {k: v for k, v in values.items() if torch.is_tensor(v) and v.dim()}

    @staticmethod
    def _is_logits_output(output: Any) -> bool:
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        return isinstance(output, LogitsProcessorOutput)

    def _output_rows(self, output: Any, cap: int) -> int:
""",
    ),
    Edit(
        BREAKABLE,
        "graph-output",
        """        if torch.is_tensor(output):
            return min(cap, output.shape[0])
""",
        """        if self._is_logits_output(output):
            rows = [t.shape[0] for t in self._logits_tensors(output).values()]
            return min([cap, *rows])
        if torch.is_tensor(output):
            return min(cap, output.shape[0])
""",
    ),
    Edit(
        BREAKABLE,
        "graph-output",
        """        if torch.is_tensor(output):
            return output.new_empty((size, *output.shape[1:]))
""",
        """        if self._is_logits_output(output):
            from dataclasses import replace

            tensors = self._logits_tensors(output)
            return replace(
                output,
                **{k: self._alloc_full_buffer(v, size) for k, v in tensors.items()},
            )
        if torch.is_tensor(output):
            return output.new_empty((size, *output.shape[1:]))
""",
    ),
    Edit(
        BREAKABLE,
        "graph-output",
        """        if torch.is_tensor(output):
            return output[:num_tokens]
""",
        """        if self._is_logits_output(output):
            from dataclasses import replace

            tensors = self._logits_tensors(output)
            return replace(output, **{k: v[:num_tokens] for k, v in tensors.items()})
        if torch.is_tensor(output):
            return output[:num_tokens]
""",
    ),
    Edit(
        BREAKABLE,
        "graph-output",
        """        if torch.is_tensor(output) and torch.is_tensor(output_buffer):
            output_buffer[:num_tokens].copy_(output[:num_tokens])
            return
""",
        """        if self._is_logits_output(output) and self._is_logits_output(output_buffer):
            source = self._logits_tensors(output)
            target = self._logits_tensors(output_buffer)
            if source.keys() != target.keys():
                raise ValueError(
                    f"BCG logits output changed: {source.keys()} != {target.keys()}"
                )
            for name, tensor in source.items():
                self._copy_output_to_buffer(tensor, target[name], num_tokens)
            return
        if torch.is_tensor(output) and torch.is_tensor(output_buffer):
            output_buffer[:num_tokens].copy_(output[:num_tokens])
            return
""",
    ),
)


def patched_text(file: str, original: str) -> str:
    """The text of a file with its edits.

    Raises:
        CheckFailed: an edit has no place, or several.
    """
    text = original
    for edit in EDITS:
        if edit.file == file:
            if text.count(edit.before) != 1:
                raise CheckFailed(
                    f"{text.count(edit.before)} places for the change '{edit.mechanism}', not one",
                    where=file,
                    remedy="install a release that q38 knows",
                )
            text = text.replace(edit.before, edit.after)
    return text


def unified_diff(tree: Path) -> str:
    """All edits as one diff against the files in `tree`, in git's form (patch -p1, git apply)."""
    parts: list[str] = []
    for file in EDITED_FILES:
        original = (tree / file).read_text(encoding="utf-8")
        lines = (original.splitlines(keepends=True), patched_text(file, original).splitlines(keepends=True))
        parts += difflib.unified_diff(*lines, f"a/{file}", f"b/{file}")
    return "".join(parts)
