"""Chinese, Japanese, Korean and Thai: a character takes several bytes and often several tokens, and arrives whole."""

from __future__ import annotations

import re

from q38.measure.behaviour.answer import Answer, common_length
from q38.measure.behaviour.row import Row, capability, protocol
from q38.measure.behaviour.target import Target

REPLACEMENT = "\ufffd"
_SURROGATE = re.compile("[\ud800-\udfff]")
_ENOUGH = 5  # characters of its script make an answer one in that script
_PROMPTS = {
    "Chinese": ("请用两句话描述秋天的早晨。", "\u4e00-\u9fff"),
    "Japanese": ("秋の朝について二文で書いてください。", "\u3040-\u30ff"),
    "Korean": ("가을 아침을 두 문장으로 묘사해 주세요.", "\uac00-\ud7af"),
    "Thai": ("ช่วยบรรยายเช้าวันหนึ่งในฤดูใบไม้ร่วงสองประโยค", "\u0e00-\u0e7f"),
}


def check(target: Target) -> list[Row]:
    """Each prompt once streamed and once whole: what the stream broke, the whole answer shows unbroken."""
    faults, notes, missing = [], [], []
    for script, (prompt, letters) in _PROMPTS.items():
        streamed = target.ask(prompt, stream=True)
        whole = target.ask(prompt)
        faults += [f"{script}: {fault}" for fault in stream_faults(streamed, whole)]
        own = min(streamed.visible.count(REPLACEMENT), whole.visible.count(REPLACEMENT))
        if own:
            notes.append(f"{script}: {own} replacement characters, streamed and whole alike")
        if own or len(re.findall(f"[{letters}]", streamed.visible)) < _ENOUGH:
            missing.append(script)
    note = f"not in the script asked for, or damaged: {', '.join(missing)}" if missing else ""
    return [
        protocol("scripts", faults, note="; ".join(notes), checked=len(_PROMPTS), unit="scripts"),
        capability(
            "script-text",
            not missing,
            judged=target.judged,
            note=note or "all in their script",
            checked=len(_PROMPTS),
            unit="scripts",
        ),
    ]


def stream_faults(streamed: Answer, whole: Answer) -> list[str]:
    """What streaming did to the text.

    A model may generate bytes that are no text, which every server shows as U+FFFD; so the stream is at fault
    only where the whole answer, equal up to there, has a character.
    """
    faults = []
    if _SURROGATE.search(streamed.visible) or _SURROGATE.search(whole.visible):
        faults.append("a code point is split into surrogates")
    one, other = streamed.visible, whole.visible
    same = common_length(one, other)
    if one[same : same + 1] == REPLACEMENT and other[same : same + 1] not in ("", REPLACEMENT):
        faults.append(
            f"the stream has a replacement character where the whole answer has {other[same]!r} (character {same})"
        )
    elif len(one) > same and other[same : same + 1] == REPLACEMENT:
        faults.append(
            f"the whole answer has a replacement character where the stream has {one[same]!r} (character {same})"
        )
    return faults
