#!/usr/bin/env python3
"""Starts a redis-server on a socket of its own, fills it, says ready, waits for the end of stdin.

    fill_redis.py SERVER RECORDS
"""
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from base64 import b64decode


class Redis:
    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.pending = []

    def command(self, *words):
        """Only for commands that answer with one line."""
        words = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        self.pending.append(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words))
        if len(self.pending) == 500:
            self.flush()

    def flush(self):
        expected, answers = len(self.pending), b""
        self.socket.sendall(b"".join(self.pending))
        self.pending = []
        while answers.count(b"\r\n") < expected:
            received = self.socket.recv(1 << 16)
            if not received:
                sys.exit("redis closed the connection")
            answers += received
        if answers.startswith(b"-") or b"\n-" in answers:
            sys.exit(f"redis refused a command: {answers!r}")


def main():
    server, records = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "redis.sock")
        arguments = ["--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", directory]
        process = subprocess.Popen([server, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            redis = Redis(wait_for(path, process))
            with open(records, encoding="utf-8") as lines:
                recent = []
                for number, line in enumerate(lines):
                    fill(redis, json.loads(line), line.strip())
                    recent.append(line)
                    if len(recent) == 100:
                        fill_lists(redis, number // 100, recent)
                        recent.clear()
            redis.flush()
            print("ready", process.pid, flush=True)
            sys.stdin.read()
        finally:
            process.kill()
            process.wait()


def wait_for(path, process):
    for _ in range(200):
        if os.path.exists(path):
            return path
        if process.poll() is not None:
            break
        time.sleep(0.05)
    sys.exit("redis-server did not start")


def fill(redis, record, line):
    """What a web shop keeps in redis. Some sessions end, which leaves holes in the heap."""
    kind = record["type"]
    if kind == "user":
        redis.command("HSET", f"user:{record['id']}", *flat(record))
        redis.command("SET", f"session:{record['uuid']}", session(record), "EX", 86400)
        redis.command("SADD", f"city:{record['address']['city']}", record["id"])
        redis.command("SET", f"taste:{record['id']}", b64decode(record["taste"]))
        if record["id"] % 5 == 0:
            redis.command("DEL", f"session:{record['uuid']}")
    elif kind == "order":
        redis.command("SET", f"order:{record['id']}", line)
        redis.command("ZADD", "orders:by-total", record["total"], record["id"])
        for item in record["items"]:
            redis.command("INCRBY", f"sold:{item['sku']}", item["quantity"])
    elif kind == "log":
        redis.command("RPUSH", f"log:{record['service']}", f"{record['time']} {record['level']} {record['message']}")
        redis.command("INCR", f"hits:{record['service']}:{record['time'][:13]}")
    elif kind == "measurement":
        redis.command("APPEND", f"series:{record['sensor']}", json.dumps(record["values"]))
    elif kind == "article":
        redis.command("HSET", f"article:{record['id']}", "body", record["body"], "embedding", b64decode(record["embedding"]))


def fill_lists(redis, number, recent):
    """A cache of packed lists, of which the oldest expire."""
    redis.command("SETEX", f"list:{number}", 3600, gzip.compress("".join(recent).encode(), mtime=0))
    redis.command("DEL", f"list:{number - 500}")


def flat(record):
    for name in ("uuid", "name", "email", "phone", "password", "created", "last_login", "about"):
        yield name
        yield record[name] or ""


def session(user):
    return json.dumps({"user": user["id"], "token": user["token"], "roles": user["roles"], "cart": [],
                       "since": user["last_login"], "preferences": user["preferences"]})


if __name__ == "__main__":
    main()
