"""Host names for one child process: a file of hosts of its own, in a mount namespace that ends with it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

HOSTS = Path("/etc/hosts")
_BIND = 'mount --bind "$0" /etc/hosts && exec "$@"'


def with_names(argv: Sequence[str], names: Mapping[str, str], hosts: Path) -> list[str]:
    """The command with these host names (addresses by name), where there are any. hosts: a file that is written, and
    that the caller deletes when the command has ended."""
    if not names:
        return list(argv)
    lines = "".join(f"{address} {name}\n" for name, address in names.items())
    hosts.write_text(lines + (HOSTS.read_text() if HOSTS.exists() else ""))
    return [*_namespace(), "sh", "-c", _BIND, str(hosts.absolute()), *argv]


def can_name() -> bool:
    """Whether this machine lets us give a child names of its own."""
    if shutil.which("unshare") is None:
        return False
    argv = [*_namespace(), "mount", "--bind", "/etc/hosts", "/etc/hosts"]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def _namespace() -> list[str]:
    return ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
