"""Which run of the kernel this is."""

from __future__ import annotations

from pathlib import Path


def boot_id() -> str:
    """Empty where the kernel does not tell, as in a sandbox that hides it. So the native library has it, too."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
