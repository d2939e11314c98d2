"""q38's plugin for SGLang. The only folder that imports sglang; inert unless q38's setting enables it.

SGLang loads `install` through the entry point `sglang.srt.plugins` in each of its processes. Keep this
module light: a plugin whose import fails is only logged, and SGLang would go on without it.
"""

from __future__ import annotations


def install() -> None:
    """Apply and verify every hook, or end this process with the list of what does not match."""
    from q38.sglang_ext.options import enabled

    if enabled():
        from q38.sglang_ext.activate import activate_or_exit

        activate_or_exit()
