#!/usr/bin/env python3
"""A Python service with its data in memory: loads the records, indexes them, says ready, waits for the end of stdin.

    fill.py RECORDS
"""
import gzip
import json
import os
import struct
import sys
from array import array
from base64 import b64decode
from collections import Counter, OrderedDict, defaultdict, namedtuple
from datetime import datetime
from decimal import Decimal

LogLine = namedtuple("LogLine", "time level service trace message")


class Order:
    def __init__(self, record):
        self.id = record["id"]
        self.customer = record["customer"]
        self.created = datetime.fromisoformat(record["created"])
        self.total = Decimal(str(record["total"]))
        self.items = [(item["sku"], item["quantity"], item["price"]) for item in record["items"]]


class Service:
    def __init__(self):
        self.users = {}
        self.by_email = {}
        self.by_city = defaultdict(list)
        self.orders = {}
        self.lines = []
        self.series = defaultdict(lambda: array("d"))
        self.articles = []
        self.words = Counter()
        self.vectors = {}
        self.lists = OrderedDict()
        self.recent = []
        self.messages = []

    def load(self, line):
        record = json.loads(line)
        getattr(self, record["type"])(record)
        if record["type"] in ("user", "order"):
            self.messages.append(message(record))
            self.recent.append(line)
            if len(self.recent) == 50:
                self.respond(f"/api/v1/{record['type']}s?until={record['id']}", gzip.compress("".join(self.recent).encode()))
                self.recent.clear()

    def user(self, record):
        self.vectors[record["uuid"]] = array("f", b64decode(record.pop("taste")))
        self.users[record["uuid"]] = record
        self.by_email[record["email"]] = record
        self.by_city[record["address"]["city"]].append(record["uuid"])

    def order(self, record):
        self.orders[record["id"]] = Order(record)

    def log(self, record):
        self.lines.append(LogLine(*(record[name] for name in LogLine._fields)))

    def measurement(self, record):
        self.series[record["sensor"]].extend(record["values"])

    def article(self, record):
        self.vectors[record["id"]] = array("f", b64decode(record.pop("embedding")))
        self.articles.append(record)
        self.words.update(record["body"].lower().split())

    def respond(self, path, body):
        """A cache of packed lists that forgets the oldest: its churn leaves holes in the heap, as such caches do."""
        self.lists[path] = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\n\r\n" + body
        if len(self.lists) > 500:
            self.lists.popitem(last=False)


def message(record):
    """The record as a protobuf message would have it."""
    out = bytearray()
    field(out, 1, record["id"])
    field(out, 2, record.get("uuid") or record["customer"])
    field(out, 3, record.get("email") or record["status"])
    field(out, 4, record.get("total", 0.0))
    return bytes(out)


def field(out, number, value):
    if isinstance(value, float):
        out.append(number << 3 | 1)
        out += struct.pack("<d", value)
    elif isinstance(value, str):
        out.append(number << 3 | 2)
        varint(out, len(value))
        out += value.encode()
    else:
        out.append(number << 3)
        varint(out, value)


def varint(out, value):
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)


def main():
    service = Service()
    with open(sys.argv[1], encoding="utf-8") as records:
        for line in records:
            service.load(line)
    print("ready", os.getpid(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
