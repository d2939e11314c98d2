"""Silence for libraries that log, warn and draw bars on stderr."""

from __future__ import annotations

import logging
import warnings

from q38.base import settings


def silence_libraries() -> None:
    """Only errors of transformers and AutoRound are shown from here on; Q38_DEBUG=1 leaves them as they are.

    For the whole process, because transformers warns at the first forward, not only while loading.
    """
    if settings.load().debug:
        return
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"(transformers|auto_round|torch|huggingface_hub)(\.|$)")


def silence_autoround() -> None:
    """The same for AutoRound, whose logger sets itself up on import."""
    if settings.load().debug:
        return
    from auto_round.logger import logger

    logger.setLevel(logging.ERROR)
