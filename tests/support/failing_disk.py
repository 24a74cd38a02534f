"""Runs a command with a failing disk mounted at a folder: ext4 on a loop device whose medium fills up midway.

    unshare --mount --propagation private python failing_disk.py FOLDER MEDIUM_MIB COMMAND…

All mounts are in the mount namespace that unshare made, and end with it.
"""

import os
import subprocess
import sys
from pathlib import Path


def call(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    folder, medium_mib, command = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    call("mount", "-t", "tmpfs", "-o", f"size={medium_mib}M", "tmpfs", str(folder))
    image = folder / "image"
    call("truncate", "-s", "2G", str(image))
    device = call("losetup", "--find", "--show", str(image))
    try:
        call("mkfs.ext4", "-q", "-O", "^has_journal", "-E", "nodiscard", device)
        call("mount", device, str(folder))
    finally:
        call("losetup", "--detach", device)  # the kernel detaches it after its last user
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
