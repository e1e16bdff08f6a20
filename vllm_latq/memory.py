"""Memory of this process, as the system counts it.

Invariant: bytes everywhere. Without /proc the peak comes from getrusage, which does not start at zero after exec.
"""

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_memory() -> int:
    """Return the largest resident size of this process so far."""
    peak = _status("VmHWM")
    # Linux counts kilobytes, macOS bytes.
    return peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status(key: str) -> int | None:
    if not _STATUS.exists():
        return None
    found = [line for line in _STATUS.read_text().splitlines() if line.startswith(f"{key}:")]
    return int(found[0].split()[1]) * 1024 if found else None
