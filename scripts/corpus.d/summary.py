#!/usr/bin/env python3
"""Says how well the files of a corpus compress, by sampling, and how many pages of them are there twice.

    summary.py FILE...
"""
import hashlib
import os
import sys
import zlib

PAGE = 4096
PACKET = 128 * PAGE


def main():
    print(f"{'file':<24}{'bytes':>12}{'zlib -1, packets':>20}{'pages':>8}{'incompressible':>16}{'twice':>8}")
    totals, seen = Total(), set()
    for name in sys.argv[1:]:
        total = Total()
        with open(name, "rb") as file:
            content = file.read()
        total.add(content, seen)
        print_line(os.path.join(*name.split(os.sep)[-2:]), total)
        totals.merge(total)
    print_line("all", totals)


class Total:
    """Every number is weighted by the size of its file, so that the sum over files is that of the whole corpus."""

    def __init__(self):
        self.bytes = self.packets = self.alone = self.incompressible = self.twice = 0

    def add(self, content, seen):
        self.bytes = len(content)
        self.packets = len(content) / ratio(samples(content, PACKET, 24))
        pages = samples(content, PAGE, 1024)
        self.alone = len(content) / ratio(pages)
        self.incompressible = len(content) * sum(ratio([page]) < 1.05 for page in pages) / len(pages)
        for start in range(0, len(content), PAGE):
            digest = hashlib.blake2b(content[start:start + PAGE], digest_size=16).digest()
            self.twice += PAGE * (digest in seen)
            seen.add(digest)

    def merge(self, other):
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def samples(content, size, most):
    """At most that many pieces, evenly spread."""
    pieces = range(0, max(1, len(content) - size + 1), size)
    step = max(1, len(pieces) / most)
    return [content[(start := pieces[int(i * step)]):start + size] for i in range(min(most, len(pieces)))]


def ratio(pieces):
    return sum(map(len, pieces)) / sum(len(zlib.compress(piece, 1)) for piece in pieces)


def print_line(name, total):
    share = lambda part: f"{100 * part / total.bytes:.1f} %"
    print(f"{name:<24}{total.bytes:>12}{total.bytes / total.packets:>20.2f}{total.bytes / total.alone:>8.2f}"
          f"{share(total.incompressible):>16}{share(total.twice):>8}")


if __name__ == "__main__":
    main()
