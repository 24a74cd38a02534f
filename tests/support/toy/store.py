"""The toy cache server's process: a file a chunk, written and read as its caller says, one line at a time.

python store.py FOLDER PORT CHUNK_BYTES     then, on the port: "write NAME CHUNKS" or "read NAME CHUNKS"
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path


def main(folder: Path, port: int, chunk_bytes: int) -> None:
    print("runs on cores", *sorted(os.sched_getaffinity(0)), flush=True)
    chunk = os.urandom(chunk_bytes)
    with socket.create_server(("127.0.0.1", port)) as door:
        caller, _ = door.accept()
    with caller, caller.makefile("rw") as lines:
        for line in lines:
            verb, name, chunks = line.split()
            moved_bytes = 0
            for number in range(int(chunks)):
                with (folder / f"{name}-{number}.data").open(f"{verb[0]}b", buffering=0) as file:
                    moved_bytes += file.write(chunk) if verb == "write" else len(file.read(chunk_bytes))
            lines.write(f"{moved_bytes}\n")
            lines.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
