// Runs jobs of graphile-worker that do nothing, and prints how many it completed per second.
// Arguments: the URL of the database, the number of jobs, the number of jobs at once, and `default` or `batched`.
// The package is found from the working directory.

import { EventEmitter } from "node:events";
import { createRequire } from "node:module";

const require = createRequire(`${process.cwd()}/`);
const { Logger, makeWorkerUtils, run } = require("graphile-worker");
const { Pool } = require("pg");

const [url, jobs, concurrency, mode] = process.argv.slice(2);
const count = Number(jobs);
const logger = new Logger(() => () => {});
const pgPool = new Pool({ connectionString: url, max: Number(concurrency) + 2 });
// The package warns about a pool without them.
pgPool.on("error", () => {});
pgPool.on("connect", (client) => client.on("error", () => {}));

const utils = await makeWorkerUtils({ pgPool, logger });
await utils.migrate();
await pgPool.query("SELECT count(graphile_worker.add_job('nothing')) FROM generate_series(1, $1)", [count]);
await pgPool.query("ANALYZE");

// The settings that its own documentation recommends for throughput.
const batched = { localQueue: { size: 500 }, completeJobBatchDelay: 0, failJobBatchDelay: 0 };
const preset = { worker: { concurrentJobs: Number(concurrency), ...(mode === "batched" ? batched : {}) } };

// Listens before the first job can end.
const events = new EventEmitter();
let completed = 0;
const all = new Promise((resolve) => {
  events.on("job:complete", () => {
    completed += 1;
    if (completed >= count) resolve();
  });
});
const begun = process.hrtime.bigint();
const runner = await run({
  preset,
  pgPool,
  logger,
  events,
  concurrency: Number(concurrency),
  noHandleSignals: true,
  taskList: { nothing: async () => {} },
});
await all;
const seconds = Number(process.hrtime.bigint() - begun) / 1e9;
console.log(count / seconds);
await runner.stop();
await utils.release();
await pgPool.end();
