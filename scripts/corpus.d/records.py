#!/usr/bin/env python3
"""Prints the JSON records that the fillers load: users, orders, log lines, measurements, articles; one a line.

    records.py SEED COUNT

The same seed gives the same records, as long as Python is the same: prose is taken from its own documentation.
"""
import hashlib
import json
import os
import random
import re
import sys
import uuid
from array import array
from base64 import b64encode, urlsafe_b64encode
from datetime import datetime, timedelta, timezone

FIRST = """Anna Ben Carla David Elif Felix Grace Hassan Ines Jakub Katarzyna Liam Mia Noah Olga Pedro Quentin Rosa Sven
Tomoko Uma Victor Wei Xenia Yusuf Zoe Amelia Bruno Chiara Dmitri Esther Fatima Giorgos Hanna Ivan Julia Kofi Lena Marek
Nadia Oscar Priya Rafael Sofia Thomas Ursula Valentina William Yara Zdenek""".split()
ENDINGS = "sen son mann berg ski ova ez ini ard er ley ton ford wood eira ak u ov stra wicz".split()
LAST = [start + end for end in ENDINGS for start in
        """Ander Beck Cost Dub Erik Fisch Garc Han Ivan Jon Kowal Lar Mey Nov Oka Petr Quin Ross Schmid Tan Ued Varg Wagn Xav
        Yil Zimmer Alm Brow Chen Di Ev Ferr Gupt Hugh Iy Jens Kim Lop Mart Nguy Ols Pat Ramir Silv Tayl Web Walk You Zhang
        Mor""".split()]
CITIES = [("Berlin", "DE", 52.52, 13.40), ("Lisbon", "PT", 38.72, -9.14), ("Oslo", "NO", 59.91, 10.75),
          ("Chicago", "US", 41.88, -87.63), ("Osaka", "JP", 34.69, 135.50), ("Lagos", "NG", 6.52, 3.38),
          ("Toronto", "CA", 43.65, -79.38), ("Lyon", "FR", 45.76, 4.84), ("Pune", "IN", 18.52, 73.86),
          ("Leeds", "GB", 53.80, -1.55), ("Gdansk", "PL", 54.35, 18.65), ("Porto Alegre", "BR", -30.03, -51.23)]
STREETS = "Main Oak Station Church Mill Park River Garden Harbour School Market Bridge Forest King Hill".split()
DOMAINS = "example.com example.org mail.example.net post.example.de corp.example.co.uk".split()
COLOURS = "black white red navy olive grey teal amber ivory copper".split()
MATERIALS = "cotton steel oak leather ceramic bamboo glass wool aluminium linen".split()
GOODS = "shirt lamp chair kettle backpack notebook mug jacket desk bottle headset keyboard blanket clock shelf".split()
SERVICES = "gateway checkout inventory auth billing search mailer recommender".split()
LEVELS = ["INFO"] * 14 + ["DEBUG"] * 4 + ["WARN"] * 2 + ["ERROR"]
ROUTES = ["/", "/login", "/api/v1/users/{}", "/api/v1/orders/{}", "/api/v2/cart/{}/items", "/static/app.{}.js",
          "/search?q={}&page=2", "/products/{}", "/healthz", "/api/v1/orders/{}/invoice.pdf"]
AGENTS = ["Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/{}.0.{}.{} Safari/537.36",
          "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/605.1.15 (KHTML, like Gecko) Version/17.{1} Safari/{0}.1.{2}",
          "Mozilla/5.0 (X11; Linux x86_64; rv:{0}.0) Gecko/20100101 Firefox/{0}.0", "curl/7.88.1", "kube-probe/1.29",
          "Mozilla/5.0 (iPhone; CPU iPhone OS 17_5 like Mac OS X) AppleWebKit/{}.1.{} Mobile/15E{}"]
START = datetime(2024, 3, 1, tzinfo=timezone.utc)


class Records:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.sentences = prose()
        self.number = seed * 1_000_000

    def next(self):
        self.number += 1
        kinds = [self.user, self.order, self.log, self.measurement, self.article]
        return self.random.choices(kinds, [25, 30, 25, 15, 5])[0]()

    def user(self):
        r = self.random
        first, last = r.choice(FIRST), r.choice(LAST)
        city, country, latitude, longitude = r.choice(CITIES)
        return {
            "type": "user",
            "id": self.number,
            "uuid": self.uuid(),
            "name": f"{first} {last}",
            "email": f"{first}.{last}{r.randrange(100)}@{r.choice(DOMAINS)}".lower(),
            "phone": f"+{r.randrange(1, 99)} {r.randrange(10**8, 10**9)}",
            "password": "scrypt$16384$" + urlsafe_b64encode(r.randbytes(32)).decode(),
            "address": {
                "street": f"{r.choice(STREETS)} Street {r.randrange(1, 240)}",
                "city": city,
                "zip": f"{r.randrange(10000, 99999)}",
                "country": country,
                "position": [latitude + r.gauss(0, 0.1), longitude + r.gauss(0, 0.1)],
            },
            "created": self.time(),
            "last_login": self.time() if r.random() < 0.8 else None,
            "newsletter": r.random() < 0.3,
            "roles": r.sample(["customer", "editor", "admin", "support", "auditor"], r.choice([1, 1, 1, 2])),
            "preferences": {"language": country.lower(), "theme": r.choice(["light", "dark"]), "page_size": 25},
            "token": self.token(),
            "taste": self.vector(64),
            "about": self.text(1) if r.random() < 0.3 else "",
        }

    def order(self):
        r = self.random
        items = [self.item() for _ in range(min(8, int(r.paretovariate(1.2))))]
        return {
            "type": "order",
            "id": self.number,
            "customer": self.uuid(),
            "status": r.choice(["paid", "shipped", "delivered", "delivered", "returned", "open"]),
            "created": self.time(),
            "items": items,
            "total": round(sum(item["quantity"] * item["price"] for item in items), 2),
            "currency": r.choice(["EUR", "EUR", "USD", "GBP"]),
            "tracking": f"{r.randrange(10**13, 10**14)}" if r.random() < 0.6 else None,
        }

    def item(self):
        r = self.random
        colour, material, good = r.choice(COLOURS), r.choice(MATERIALS), r.choice(GOODS)
        return {
            "sku": f"{good[:3]}-{material[:3]}-{r.randrange(10000):04}".upper(),
            "title": f"{colour.capitalize()} {material} {good}",
            "quantity": min(9, int(r.paretovariate(2))),
            "price": round(r.lognormvariate(3.2, 0.8), 2),
        }

    def log(self):
        r = self.random
        ip = ".".join(str(r.randrange(1, 255)) for _ in range(4))
        path = r.choice(ROUTES).format(r.randrange(100000))
        status = r.choice([200] * 12 + [201, 204, 301, 304, 404, 500])
        return {
            "type": "log",
            "time": self.time(),
            "level": r.choice(LEVELS),
            "service": r.choice(SERVICES),
            "trace": f"00-{r.getrandbits(128):032x}-{r.getrandbits(64):016x}-01",
            "message": f'{ip} "{r.choice(["GET", "GET", "GET", "POST", "PUT"])} {path} HTTP/1.1" {status} '
                       f'{int(r.lognormvariate(7, 2))} {r.lognormvariate(-4, 1):.4f} "{self.agent()}"',
        }

    def measurement(self):
        r = self.random
        level = r.uniform(5, 60)
        return {
            "type": "measurement",
            "sensor": f"plant-{r.randrange(12)}/line-{r.randrange(6)}/temp-{r.randrange(40)}",
            "start": int(START.timestamp()) + r.randrange(10**7),
            "step": 15,
            "values": [round(level + r.gauss(0, 0.7), 3) for _ in range(24)],
            "mean": level + r.gauss(0, 0.1),
        }

    def article(self):
        r = self.random
        return {
            "type": "article",
            "id": self.number,
            "author": f"{r.choice(FIRST)} {r.choice(LAST)}",
            "created": self.time(),
            "title": self.text(1)[:60],
            "body": self.text(r.randrange(6, 30)),
            "embedding": self.vector(256),
            "digest": hashlib.sha256(r.randbytes(8)).hexdigest(),
        }

    def agent(self):
        r = self.random
        return r.choice(AGENTS).format(r.randrange(110, 127), r.randrange(6000, 6500), r.randrange(200))

    def token(self):
        """A session's JSON web token: the signature is of 256 bits, the rest says who it is."""
        r = self.random
        issued = int(START.timestamp()) + r.randrange(10**7)
        claims = {"sub": self.uuid(), "iat": issued, "scope": "shop account", "iss": "https://login.example.com"}
        parts = [json.dumps({"alg": "HS256", "typ": "JWT"}).encode(), json.dumps(claims).encode(), r.randbytes(32)]
        return ".".join(urlsafe_b64encode(part).decode().rstrip("=") for part in parts)

    def vector(self, length):
        """What a model makes of a user or a text: single-precision numbers, packed as web services pack them."""
        return b64encode(array("f", (self.random.gauss(0, length**-0.5) for _ in range(length))).tobytes()).decode()

    def uuid(self):
        return str(uuid.UUID(int=self.random.getrandbits(128), version=4))

    def time(self):
        r = self.random
        return (START + timedelta(seconds=r.randrange(10**7), microseconds=r.randrange(10**6))).isoformat()

    def text(self, sentences):
        return " ".join(self.random.choice(self.sentences) for _ in range(sentences))


def prose():
    """Sentences out of the documentation in Python's own library."""
    library = os.path.dirname(os.__file__)
    files = [os.path.join(library, name) for name in sorted(os.listdir(library)) if name.endswith(".py")]
    files.append(os.path.join(library, "pydoc_data", "topics.py"))
    sentences = {}
    for name in filter(os.path.exists, files):
        with open(name, encoding="utf-8", errors="replace") as file:
            text = re.sub(r"\\n'\s*'|\s+", " ", file.read())
        sentences.update(dict.fromkeys(re.findall(r"(?<=\. )[A-Z][a-z]+(?: [a-zA-Z,;'()-]+){5,40}\.", text)))
    if len(sentences) < 500:
        sys.exit(f"records: only {len(sentences)} sentences in {library}: install Python's whole library")
    return list(sentences)


def main():
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    records = Records(seed)
    for _ in range(count):
        print(json.dumps(records.next()))


if __name__ == "__main__":
    main()
