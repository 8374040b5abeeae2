// A node service with its data in memory: loads the records, indexes them, says ready, waits for the end of stdin.
//
//     node fill.js RECORDS
'use strict';
const fs = require('fs');
const readline = require('readline');
const zlib = require('zlib');

class Order {
  constructor(record) {
    this.id = record.id;
    this.customer = record.customer;
    this.created = new Date(record.created);
    this.total = record.total;
    this.lines = record.items.map((item) => ({ sku: item.sku, title: item.title, sum: item.quantity * item.price }));
  }
}

const state = {
  users: new Map(),
  byEmail: {},
  orders: [],
  log: [],
  series: new Map(),
  words: new Map(),
  articles: [],
  vectors: new Map(),
  recent: [],
  lists: new Map(),
};

const load = {
  user(record) {
    state.vectors.set(record.uuid, vector(record.taste));
    delete record.taste;
    state.users.set(record.uuid, record);
    state.byEmail[record.email] = record.uuid;
    list(`/users?until=${record.id}`, record);
  },
  order(record) {
    state.orders.push(new Order(record));
    list(`/orders?until=${record.id}`, record);
  },
  log(record) {
    state.log.push({ at: Date.parse(record.time), level: record.level, trace: record.trace, words: record.message.split(' ') });
  },
  measurement(record) {
    const known = state.series.get(record.sensor) || new Float64Array(0);
    const longer = new Float64Array(known.length + record.values.length);
    longer.set(known);
    longer.set(record.values, known.length);
    state.series.set(record.sensor, longer);
  },
  article(record) {
    state.vectors.set(record.id, vector(record.embedding));
    delete record.embedding;
    state.articles.push(record);
    for (const word of record.body.toLowerCase().split(/\W+/)) {
      state.words.set(word, (state.words.get(word) || 0) + 1);
    }
  },
};

function vector(packed) {
  const bytes = Buffer.from(packed, 'base64');
  return new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
}

// A cache of packed lists that forgets the oldest.
function list(path, record) {
  state.recent.push(record);
  if (state.recent.length < 50) {
    return;
  }
  state.lists.set(path, zlib.gzipSync(JSON.stringify(state.recent)));
  state.recent = [];
  if (state.lists.size > 500) {
    state.lists.delete(state.lists.keys().next().value);
  }
}

async function main() {
  const lines = readline.createInterface({ input: fs.createReadStream(process.argv[2]) });
  for await (const line of lines) {
    const record = JSON.parse(line);
    load[record.type](record);
  }
  console.log(`ready ${process.pid}`);
  process.stdin.resume();
  process.stdin.on('end', () => process.exit(0));
}

main();
