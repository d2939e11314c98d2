"""Which tensors of a checkpoint go through SGLang's own loader."""

from __future__ import annotations

from q38.model.names import EXPERT, Group, classify

_UNUSED = frozenset({Group.MTP, Group.MTP_EXPERTS})  # the predictor is not loaded


def for_sglang(name: str, *, table_on_disk: bool) -> bool:
    """Every tensor but expert rows, the predictor, and an n-gram table that stays on disk."""
    group = classify(name)
    if EXPERT.match(name) is not None or group in _UNUSED:
        return False
    return not (table_on_disk and group is Group.NGRAM)
