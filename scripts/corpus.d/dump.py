#!/usr/bin/env python3
"""Writes the non-zero 4 KiB pages of a process or of files.

    dump.py process OUT MIB COMMAND...   starts the command, waits until it prints "ready PID", writes the anonymous memory
                                         of that process, ends the command (its stdin ends too, should this be killed)
    dump.py files OUT MIB DIRECTORY...   what a page cache might hold of the files in the directories

Of more than MIB, it takes runs of 128 pages that are evenly spread.
"""
import contextlib
import os
import random
import signal
import struct
import subprocess
import sys

PAGE = 4096
RUN = 128
ZERO = bytes(PAGE)


def main():
    kind, out, limit, rest = sys.argv[1], sys.argv[2], int(sys.argv[3]) * (1 << 20) // PAGE, sys.argv[4:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("dump: terminated"))
    pages = {"process": process_pages, "files": lambda rest: file_pages(rest, limit)}[kind](rest)
    if not pages:
        sys.exit(f"dump: nothing to write into {out}")
    print(f"dump: {len(pages) * PAGE >> 20} MiB of pages that are not zero")
    with open(out + ".new", "wb") as file:
        file.writelines(spread(pages, limit))
    os.rename(out + ".new", out)


def spread(pages, limit):
    runs = [pages[i:i + RUN] for i in range(0, len(pages), RUN)]
    wanted = min(len(runs), limit // RUN)
    for i in range(wanted):
        yield from runs[i * len(runs) // wanted]


def process_pages(command):
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    try:
        return anonymous_pages(wait_until_ready(process))
    finally:
        end(process)


def end(process):
    """Asks the command and all that it started to end, then insists."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)


def wait_until_ready(process):
    for line in process.stdout:
        words = line.split()
        if len(words) == 2 and words[0] == b"ready":
            return int(words[1])
    sys.exit(f"dump: the command ended before it was ready (exit {process.wait()})")


def anonymous_pages(pid):
    pages = []
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory, open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
        for start, end in anonymous_areas(pid):
            for address in resident(pagemap, start, end):
                page = os.pread(memory.fileno(), PAGE, address)
                if len(page) == PAGE and page != ZERO:
                    pages.append(page)
    return pages


def anonymous_areas(pid):
    with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
        for line in maps:
            words = line.split(maxsplit=5)
            name = words[5].strip() if len(words) == 6 else ""
            if words[1].startswith("rw") and words[4] == "0" and (name in ("", "[heap]") or name.startswith("[anon:")):
                start, end = words[0].split("-")
                yield int(start, 16), int(end, 16)


def resident(pagemap, start, end):
    """The addresses of the pages that are present (pagemap's bit 63)."""
    for chunk in range(start, end, PAGE * RUN):
        count = min(RUN, (end - chunk) // PAGE)
        entries = os.pread(pagemap.fileno(), 8 * count, chunk // PAGE * 8)
        for i, (entry,) in enumerate(struct.iter_unpack("<Q", entries)):
            if entry >> 63:
                yield chunk + i * PAGE


def file_pages(directories, limit):
    """Up to 1 MiB of each of some files, the same ones every time, the last page filled up with zeros."""
    walks = (walk for directory in directories for walk in os.walk(directory))
    names = sorted(os.path.join(path, name) for path, _, names in walks for name in names)
    random.Random(1).shuffle(names)
    pages = []
    for name in names:
        if len(pages) >= limit:
            break
        if os.path.islink(name) or not os.path.isfile(name):
            continue
        with open(name, "rb") as file:
            content = file.read(1 << 20)
        for i in range(0, len(content), PAGE):
            page = content[i:i + PAGE].ljust(PAGE, b"\0")
            if page != ZERO:
                pages.append(page)
    return pages[:limit]


if __name__ == "__main__":
    main()
